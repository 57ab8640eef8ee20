"""The exact k best entries of each row, ties to the lower index, in ascending order; and the candidate pool made of it.

A row of at most one chunk is held by one program: the k-th largest value is found by halving an interval of order
preserving keys and counting, and a prefix sum places what is chosen, in order, without a sort. Longer rows: a sample of
the row gives a threshold that about twice k entries pass, narrow programs stream the row once and keep what passes, and
the same selection runs over what was kept. Rows where too few or too many passed are done again chunk by chunk without
a threshold: the result is exact whatever the sample said. No score is NaN.
Shapes: R rows, T entries, K slots, C parts of a row. Twins: kernels/attention/reference.py::select_top_ref,
candidate_blocks_ref.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from burnish.kernels.attention.reference import select_top_ref
from burnish.kernels.dispatch import use_reference


@triton.jit
def _key(x, BITS: tl.constexpr):
    """Integers of the same order as the values, of their highest BITS bits."""
    bits = x.to(tl.int32, bitcast=True) >> (32 - BITS)
    return tl.where(bits < 0, bits ^ ((1 << (BITS - 1)) - 1), bits)


@triton.jit
def _value(key, BITS: tl.constexpr):
    bits = tl.where(key < 0, key ^ ((1 << (BITS - 1)) - 1), key) << (32 - BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _count(chosen):
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _threshold(x, k, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """(t, passed): the largest t of BITS bits that at least k values reach, and how many do; t below every value
    when fewer than k are above -inf; any t that exactly k values reach, if there is one on the way.

    Args:
        x: [BLOCK] fp32, -inf for what may not be chosen.
        GROUPS: power of two, at least k if the search is to start close.
    """
    best = tl.max(tl.reshape(x, (BLOCK // GROUPS, GROUPS)), 0)
    # one value of each group reaches the least of the groups' maxima
    least = tl.where(k <= GROUPS, tl.min(best, 0), float("-inf"))
    low = _key(tl.maximum(least, -3.4028234663852886e38), BITS)
    high = _key(tl.max(best, 0), BITS) + 1
    passed = _count(x >= _value(low, BITS))
    gap = high - low
    while (passed > k) & (gap != 1):
        middle = low + (gap.to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True)
        number = _count(x >= _value(middle, BITS))
        high = tl.where(number >= k, high, middle)
        low = tl.where(number >= k, middle, low)
        passed = tl.where(number >= k, number, passed)
        gap = high - low
    return _value(low, BITS), passed


@triton.jit
def _place(x, threshold, passed, k):
    """(chosen, slot): what is above the threshold, and the first ones equal to it, up to k in all."""
    if passed <= k:
        chosen = x >= threshold
        slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    else:
        is_above, is_equal = x > threshold, x == threshold
        need = k - _count(is_above)
        # both counts in one prefix sum, 16 bits each
        both = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        before = tl.cumsum(both, 0) - both
        equal = (before >> 16) & 0xFFFF
        chosen = is_above | (is_equal & (equal < need))
        slot = (before & 0xFFFF) + tl.minimum(equal, need)
    return chosen, slot


@triton.jit
def _load_scores(score_ptr, i, limit, VECTOR: tl.constexpr):
    """[..] fp32, -inf from `limit` on; whole vectors are read, which needs rows of whole vectors."""
    x = tl.load(score_ptr + i, mask=i < tl.cdiv(limit, VECTOR) * VECTOR, other=float("-inf")).to(tl.float32)
    return tl.where(i < limit, x, float("-inf"))


@triton.jit
def _fill_empty(out_ptr, number, k, SLOTS: tl.constexpr):
    slot = tl.arange(0, SLOTS)
    tl.store(out_ptr + slot, tl.full((SLOTS,), -1, tl.int32), mask=(slot >= number) & (slot < k))


@triton.jit
def _select_kernel(
    score_ptr, limit_ptr, blocks_ptr, out_ptr, stride, M, k,
    BITS: tl.constexpr, VECTOR: tl.constexpr, HAS_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limit_ptr + row).to(tl.int32)
    i = tl.arange(0, BLOCK)
    x = _load_scores(score_ptr + row * stride, i, limit, VECTOR)
    threshold, passed = _threshold(x, k, BITS, BLOCK, SLOTS)
    chosen, slot = _place(x, threshold, passed, k)
    entry = i
    if HAS_BLOCKS:
        # a column of a candidate block stands for an entry
        entry = tl.load(blocks_ptr + row * M + i // 8, mask=chosen, other=0) * 8 + i % 8
    tl.store(out_ptr + row * k + slot, entry, mask=chosen)
    _fill_empty(out_ptr + row * k, passed, k, SLOTS)


@triton.jit
def _sample_kernel(
    score_ptr, limit_ptr, threshold_ptr, stride, k, VECTOR: tl.constexpr, SAMPLES: tl.constexpr, SLOTS: tl.constexpr
):
    # eight neighbours (a sector of memory) at a random place of each of SAMPLES / 8 equal windows
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limit_ptr + row).to(tl.int32)
    i = tl.arange(0, SAMPLES)
    window = tl.maximum(limit // SAMPLES, 1)
    noise = ((i // 8 + 1) * 0x2C1B3C6D) ^ ((i // 8 + 77) * 0x297A2D39)
    at = (i // 8 * window + ((noise >> 7) & 0xFFFF) % window) * 8 + i % 8
    x = _load_scores(score_ptr + row * stride, at, limit, VECTOR)
    # twice k entries of the row and a margin are expected to reach the sample's rank-th value
    rank = 2 * k // window + 8
    threshold, _ = _threshold(x, rank, 16, SAMPLES, SLOTS)
    tl.store(threshold_ptr + row, threshold)


@triton.jit
def _pass_kernel(
    score_ptr, limit_ptr, threshold_ptr, kept_ptr, entry_ptr, count_ptr, stride, span, num_parts, room,
    VECTOR: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    limit = tl.load(limit_ptr + row).to(tl.int32)
    threshold = tl.load(threshold_ptr + row)
    score_ptr += row * stride
    kept = kept_ptr + (row * num_parts + part) * room
    entries = entry_ptr + (row * num_parts + part) * room
    end = tl.minimum((part + 1) * span, limit)
    step = tl.arange(0, STEP)
    count = tl.full((), 0, tl.int32)
    x = _load_scores(score_ptr, part * span + step, end, VECTOR)
    for start in range(part * span, end, STEP):
        # the next step's values are on their way while this step's are counted
        following = _load_scores(score_ptr, start + STEP + step, end, VECTOR)
        chosen = x >= threshold
        passed = _count(chosen)
        if passed > 0:
            slot = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(kept + slot, x, mask=chosen & (slot < room))
            tl.store(entries + slot, start + step, mask=chosen & (slot < room))
            count += passed
        x = following
    tl.store(count_ptr + row * num_parts + part, count)


@triton.jit
def _is_good(counts, threshold, k, room, WIDE: tl.constexpr):
    """What passed in the parts of a row holds its k best: all of it was kept, there is enough, and not too much."""
    total = tl.sum(counts, 0)
    return (tl.max(counts, 0) <= room) & (total <= WIDE) & ((total >= k) | (threshold <= -3.3e38))


@triton.jit
def _again_kernel(
    score_ptr, limit_ptr, threshold_ptr, count_ptr, kept_ptr, entry_ptr, again_ptr,
    stride, k, num_parts, num_chunks, room,
    BITS: tl.constexpr, VECTOR: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, SLOTS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p = tl.arange(0, PARTS)
    counts = tl.load(count_ptr + row * num_parts + p, mask=p < num_parts, other=0)
    if _is_good(counts, tl.load(threshold_ptr + row), k, room, WIDE) == 0:
        limit = tl.load(limit_ptr + row).to(tl.int32)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _load_scores(score_ptr + row * stride, i, limit, VECTOR)
        threshold, passed = _threshold(x, k, BITS, CHUNK, SLOTS)
        chosen, slot = _place(x, threshold, passed, k)
        at = (row * num_chunks + chunk) * SLOTS + slot
        tl.store(kept_ptr + at, x, mask=chosen)
        tl.store(entry_ptr + at, i, mask=chosen)
        tl.store(again_ptr + row * num_chunks + chunk, tl.minimum(passed, k))


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _merge(
    kept_ptr, entry_ptr, mark_ptr, out_ptr, counts, part, num_parts, room, k,
    BITS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Select among what the parts of a row kept, WIDTH values at most, in the order of the row."""
    w = tl.arange(0, WIDTH)
    tl.store(mark_ptr + w, tl.full((WIDTH,), 0, tl.int32))
    tl.debug_barrier()
    first = tl.cumsum(counts, 0) - counts
    tl.store(mark_ptr + first, (part << 16) | first, mask=(counts > 0) & (part < num_parts))
    tl.debug_barrier()
    # the last mark at or before a place names the part it belongs to and where that begins
    mark = tl.associative_scan(tl.load(mark_ptr + w, cache_modifier=".cg"), 0, _later)
    at = (mark >> 16) * room + w - (mark & 0xFFFF)
    is_there = w < tl.sum(counts, 0)
    x = tl.load(kept_ptr + at, mask=is_there, other=float("-inf"))
    threshold, passed = _threshold(x, k, BITS, WIDTH, SLOTS)
    chosen, slot = _place(x, threshold, passed, k)
    tl.store(out_ptr + slot, tl.load(entry_ptr + at, mask=chosen, other=0), mask=chosen)
    _fill_empty(out_ptr, passed, k, SLOTS)


@triton.jit
def _merge_kernel(
    kept_ptr, entry_ptr, count_ptr, threshold_ptr, kept2_ptr, entry2_ptr, again_ptr, mark_ptr, out_ptr,
    k, num_parts, num_chunks, room,
    BITS: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    counts = tl.load(count_ptr + row * num_parts + part, mask=part < num_parts, other=0)
    kept_ptr += row * num_parts * room
    entry_ptr += row * num_parts * room
    is_good = _is_good(counts, tl.load(threshold_ptr + row), k, room, WIDE)
    mark_ptr += row * WIDE
    out_ptr += row * k
    if is_good == 0:
        counts = tl.load(again_ptr + row * num_chunks + part, mask=part < num_chunks, other=0)
        kept2_ptr += row * num_chunks * SLOTS
        entry2_ptr += row * num_chunks * SLOTS
        _merge(kept2_ptr, entry2_ptr, mark_ptr, out_ptr, counts, part, num_chunks, SLOTS, k, BITS, SLOTS, WIDE)
    elif tl.sum(counts, 0) <= NARROW:
        _merge(kept_ptr, entry_ptr, mark_ptr, out_ptr, counts, part, num_parts, room, k, BITS, SLOTS, NARROW)
    else:
        _merge(kept_ptr, entry_ptr, mark_ptr, out_ptr, counts, part, num_parts, room, k, BITS, SLOTS, WIDE)


@dataclass(frozen=True, kw_only=True)
class SelectTiles:
    """How a selection is cut."""

    chunk: int = 16384
    """Entries a program may hold."""
    samples: int = 8192
    step: int = 512
    """Entries of one step of a streaming program."""
    least_span: int = 2048
    """Fewest entries of a streaming program."""
    programs: int = 2048
    """Streaming programs of a launch to aim for."""
    room: int = 2048
    """Values a streaming program can keep."""
    wide: int = 32768
    """Values the merge can hold."""


def _warps(elements: int) -> int:
    return max(4, min(32, elements // 1024))


def _check(scores: torch.Tensor, visible: torch.Tensor, k: int, blocks: torch.Tensor | None) -> None:
    if scores.dim() != 2 or scores.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"select_top: scores must be fp32 or bf16 [R, T], got {scores.dtype} {tuple(scores.shape)}")
    if visible.shape != scores.shape[:1]:
        raise ValueError(f"select_top: visible must be {tuple(scores.shape[:1])}, got {tuple(visible.shape)}")
    if k < 1:
        raise ValueError(f"select_top: k must be at least 1, got {k}")
    if blocks is not None and 8 * blocks.shape[1] != scores.shape[1]:
        raise ValueError(f"select_top: {scores.shape[1]} columns are not 8 of each of {blocks.shape[1]} blocks")


def _vector(scores: torch.Tensor) -> int:
    """Values that may be read at once past a row's limit."""
    return 8 if scores.shape[1] % 8 == 0 and scores.stride(0) % 8 == 0 else 1


def _select_long(scores: torch.Tensor, visible: torch.Tensor, k: int, out: torch.Tensor, tiles: SelectTiles) -> None:
    """Rows of more than one chunk, in four launches."""
    num_rows, length = scores.shape
    device, stride, bits, vector = scores.device, scores.stride(0), 8 * scores.element_size(), _vector(scores)
    slots = triton.next_power_of_2(k)
    span = max(tiles.least_span, triton.cdiv(length * num_rows, tiles.programs))
    span = min(triton.next_power_of_2(span), tiles.chunk)
    num_parts, num_chunks = triton.cdiv(length, span), triton.cdiv(length, tiles.chunk)
    parts, room = max(16, triton.next_power_of_2(num_parts)), min(span, tiles.room)
    if num_chunks * k > tiles.wide or parts > 1 << 15:
        raise ValueError(f"select_top: {length} columns with k={k} are {num_chunks} chunks: too many to merge")

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    threshold = scratch(num_rows, dtype=torch.float32)
    kept, entry = scratch(num_rows, num_parts, room, dtype=torch.float32), scratch(num_rows, num_parts, room)
    kept2, entry2 = scratch(num_rows, num_chunks, slots, dtype=torch.float32), scratch(num_rows, num_chunks, slots)
    counts, again, mark = scratch(num_rows, num_parts), scratch(num_rows, num_chunks), scratch(num_rows, tiles.wide)
    _sample_kernel[(num_rows,)](
        scores, visible, threshold, stride, k, VECTOR=vector, SAMPLES=tiles.samples, SLOTS=min(slots, tiles.samples),
        num_warps=_warps(tiles.samples),
    )  # fmt: skip
    _pass_kernel[(num_parts, num_rows)](
        scores, visible, threshold, kept, entry, counts, stride, span, num_parts, room,
        VECTOR=vector, STEP=tiles.step, num_warps=1,
    )  # fmt: skip
    _again_kernel[(num_chunks, num_rows)](
        scores, visible, threshold, counts, kept2, entry2, again, stride, k, num_parts, num_chunks, room,
        BITS=bits, VECTOR=vector, PARTS=parts, CHUNK=tiles.chunk, SLOTS=slots, WIDE=tiles.wide,
        num_warps=_warps(tiles.chunk),
    )  # fmt: skip
    _merge_kernel[(num_rows,)](
        kept, entry, counts, threshold, kept2, entry2, again, mark, out, k, num_parts, num_chunks, room,
        BITS=bits, PARTS=parts, SLOTS=slots, NARROW=min(tiles.wide, max(4096, 4 * slots)), WIDE=tiles.wide,
        num_warps=16,
    )  # fmt: skip


def select_top(
    scores: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    *,
    blocks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: SelectTiles = SelectTiles(),
) -> torch.Tensor:
    """Indices of the k best entries of each row: score descending, then index ascending.

    Args:
        scores: [R, T] fp32 or bf16, contiguous rows; -inf is never chosen.
        visible: [R] int, only the first `visible` columns of a row count.
        k: slots.
        blocks: [R, T / 8] int32: column 8 i + j stands for entry 8 blocks[i] + j; only for rows of at most one chunk.
        out: [R, k] int32 to write into.
        tiles: for tests and measurements.

    Returns:
        [R, k] int32, ascending, -1 (none) last.

    Raises:
        ValueError: shapes do not fit, or more columns than can be merged.
    """
    _check(scores, visible, k, blocks)
    num_rows, length = scores.shape
    if use_reference(scores):
        allowed = torch.arange(length, device=scores.device) < visible.unsqueeze(1)
        order = select_top_ref(scores.float(), allowed, k)
        if blocks is not None:
            entry = blocks.long().gather(1, order.clamp_min(0) // 8) * 8 + order.clamp_min(0) % 8
            order = torch.where(order < 0, -1, entry)
        return order.to(torch.int32)
    if out is None:
        out = torch.empty(num_rows, k, dtype=torch.int32, device=scores.device)
    if not num_rows:
        return out
    slots = triton.next_power_of_2(k)
    block = max(triton.next_power_of_2(max(length, 1)), slots, 16)
    if block > max(tiles.chunk, slots) and blocks is None:
        _select_long(scores, visible, k, out, tiles)
        return out
    _select_kernel[(num_rows,)](
        scores, visible, blocks, out, scores.stride(0), blocks.shape[1] if blocks is not None else 0, k,
        BITS=8 * scores.element_size(), VECTOR=_vector(scores), HAS_BLOCKS=blocks is not None, BLOCK=block,
        SLOTS=slots, num_warps=_warps(block),
    )  # fmt: skip
    return out


def candidate_pool(block_max: torch.Tensor, visible: torch.Tensor, keep: int) -> torch.Tensor:
    """The candidate pool of each row as block ids.

    Args:
        block_max: [R, B] maxima of 8 entries, +inf at the block of the newest visible entry (see `index_scores`).
        visible: [R] int, entries a row may see.
        keep: blocks kept at most.

    Returns:
        [R, keep] int32 block ids, ascending, -1 last.
    """
    return select_top(block_max, (visible + 7) // 8, keep)
