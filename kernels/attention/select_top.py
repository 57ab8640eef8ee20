"""The exact k best entries of each row, ties to the lower index, in ascending order; and the candidate pool made of it.

The k best of a row lie in the k groups with the best maxima (equal maxima: the first groups), so long rows are read once
for the maxima of groups of 64 and 512, and one program a row walks down: k groups of 512, of 64, of 8, then k entries.
Every step looks at 8 k values: the k-th largest is found by guessing within an interval of order preserving keys and
counting, and a prefix sum places what is chosen, in order, without a sort. No score is NaN.
Shapes: R rows, T entries, K slots. Twins: kernels/attention/reference.py::select_top_ref, candidate_blocks_ref.
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
    return tl.sum(chosen.to(tl.int32), axis=None)


@triton.jit
def _bounds(x, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """(least, top): at least GROUPS values of x [WIDTH / 8, 8] reach the one, none exceeds the other."""
    best = tl.max(tl.reshape(x, (WIDTH // GROUPS, GROUPS)), 0)
    # one value of each group reaches the least of the groups' maxima
    return tl.min(best, 0), tl.max(best, 0)


@triton.jit
def _threshold(x, least, top, k, BITS: tl.constexpr):
    """(t, passed): the largest t of BITS bits that at least k values reach, and how many do; t below every value
    when fewer than k are above -inf; any t that exactly k values reach, if there is one on the way.

    Args:
        x: [..] fp32, -inf for what may not be chosen.
        least: k values reach it, or it is -inf.
        top: no value exceeds it.
    """
    low = _key(tl.maximum(least, -3.4028234663852886e38), BITS)
    high = _key(top, BITS) + 1
    passed, above = _count(x >= _value(low, BITS)), tl.full((), 0, tl.int32)
    if top == float("inf"):
        # between infinity and the rest nothing could be guessed
        infinite = _count(x == float("inf"))
        rest = tl.max(tl.where(x == float("inf"), float("-inf"), x), axis=None)
        low = tl.where(infinite >= k, high - 1, low)
        passed = tl.where(infinite >= k, infinite, passed)
        above = tl.where(infinite >= k, 0, infinite)
        high = tl.where(infinite >= k, high, tl.maximum(_key(rest, BITS), low) + 1)
    gap, step = high - low, tl.full((), 0, tl.int32)
    while (passed > k) & (gap != 1):
        # the tail of scores falls like an exponential: guess on the logarithm of counts, halve at every third step
        share = tl.log2(passed.to(tl.float32) / k) / tl.log2(passed.to(tl.float32) / (above.to(tl.float32) + 0.5))
        from_value = _value(low, BITS)
        guess = _key(from_value + (_value(high, BITS) - from_value) * share, BITS)
        half = low + (gap.to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True)
        middle = tl.where(step % 3 == 2, half, tl.minimum(tl.maximum(guess, low + 1), high - 1))
        number = _count(x >= _value(middle, BITS))
        is_enough = number >= k
        high, above = tl.where(is_enough, high, middle), tl.where(is_enough, above, number)
        low, passed = tl.where(is_enough, middle, low), tl.where(is_enough, number, passed)
        gap, step = high - low, step + 1
    return _value(low, BITS), passed


@triton.jit
def _before(number):
    """Sum of what comes before each value of [N, 8], row by row."""
    rows = tl.sum(number, 1)
    return (tl.cumsum(rows, 0) - rows)[:, None] + tl.cumsum(number, 1) - number


@triton.jit
def _place(x, threshold, passed, k):
    """(chosen, slot) of x [N, 8]: what is above the threshold, and the first ones equal to it, up to k in all."""
    if passed <= k:
        chosen = x >= threshold
        slot = _before(chosen.to(tl.int32))
    else:
        is_above, is_equal = x > threshold, x == threshold
        need = k - _count(is_above)
        # both counts in one prefix sum, 16 bits each
        before = _before(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16))
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
def _narrow(x, place, least, top, scratch_ptr, k, BITS: tl.constexpr, SLOTS: tl.constexpr):
    """Places of the k best of x [N, 8] as [SLOTS], ascending, -1 last, and what they reach."""
    threshold, passed = _threshold(x, least, top, k, BITS)
    chosen, slot = _place(x, threshold, passed, k)
    tl.store(scratch_ptr + slot, place, mask=chosen)
    _fill_empty(scratch_ptr, tl.minimum(passed, k), SLOTS, SLOTS)
    tl.debug_barrier()
    return tl.load(scratch_ptr + tl.arange(0, SLOTS)), threshold


@triton.jit
def _places(WIDTH: tl.constexpr):
    """[WIDTH / 8, 8]: 0, 1, 2, ..."""
    return tl.arange(0, WIDTH // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _load_members(ptr, parent, limit):
    """(values, places) [SLOTS, 8] of the eight members of each chosen group; -inf where there is none."""
    place = tl.maximum(parent, 0)[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = (parent >= 0)[:, None] & (place < limit)
    return tl.load(ptr + place, mask=mask, other=float("-inf")).to(tl.float32), place


@triton.jit
def _load_group_maxima(score_ptr, group, limit, VECTOR: tl.constexpr, WIDTH: tl.constexpr):
    """Maxima of the groups of eight scores `group` [WIDTH / 8, 8]."""
    at = tl.reshape(group, (WIDTH,))[:, None] * 8 + tl.arange(0, 8)[None, :]
    return tl.reshape(tl.max(_load_scores(score_ptr, at, limit, VECTOR), 1), (WIDTH // 8, 8))


@triton.jit
def _finish(
    x, place, least, top, blocks_ptr, out_ptr, k, BITS: tl.constexpr, HAS_BLOCKS: tl.constexpr, SLOTS: tl.constexpr
):
    """Write the k best of x [N, 8]."""
    threshold, passed = _threshold(x, least, top, k, BITS)
    chosen, slot = _place(x, threshold, passed, k)
    if HAS_BLOCKS:
        # a column of a candidate block stands for an entry
        place = tl.load(blocks_ptr + place // 8, mask=chosen, other=0) * 8 + place % 8
    tl.store(out_ptr + slot, place, mask=chosen)
    _fill_empty(out_ptr, passed, k, SLOTS)


@triton.jit
def _select_kernel(
    score_ptr, limit_ptr, blocks_ptr, out_ptr, scratch_ptr, stride, M, k,
    BITS: tl.constexpr, VECTOR: tl.constexpr, HAS_BLOCKS: tl.constexpr, GROUPED: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    # rows of at most BLOCK entries
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limit_ptr + row).to(tl.int32)
    score_ptr += row * stride
    out_ptr += row * k
    if HAS_BLOCKS:
        blocks_ptr += row * M
    if GROUPED:
        group = _places(BLOCK // 8)
        best = _load_group_maxima(score_ptr, group, limit, VECTOR, BLOCK // 8)
        least, top = _bounds(best, BLOCK // 8, SLOTS)
        parent, least = _narrow(best, group, least, top, scratch_ptr + row * SLOTS, k, BITS, SLOTS)
        x, place = _load_members(score_ptr, parent, limit)
    else:
        place = _places(BLOCK)
        x = _load_scores(score_ptr, place, limit, VECTOR)
        least, top = _bounds(x, BLOCK, SLOTS)
    _finish(x, place, least, top, blocks_ptr, out_ptr, k, BITS, HAS_BLOCKS, SLOTS)


@triton.jit
def _maxima_kernel(
    score_ptr, limit_ptr, fine_ptr, coarse_ptr, stride, num_fine, num_coarse,
    VECTOR: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    # COUNT groups of GROUP entries a program
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    limit = tl.load(limit_ptr + row).to(tl.int32)
    if part * (COUNT * GROUP) < limit:
        group = part * COUNT + tl.arange(0, COUNT)
        member = tl.arange(0, GROUP)
        x = _load_scores(score_ptr + row * stride, group[:, None] * GROUP + member[None, :], limit, VECTOR)
        best = tl.max(x, 1)
        tl.store(fine_ptr + row * num_fine + group, best.to(fine_ptr.dtype.element_ty), mask=group < num_fine)
        above = part * (COUNT // 8) + tl.arange(0, COUNT // 8)
        best = tl.max(tl.reshape(best, (COUNT // 8, 8)), 1)
        at = coarse_ptr + row * num_coarse + above
        tl.store(at, best.to(coarse_ptr.dtype.element_ty), mask=above < num_coarse)


@triton.jit
def _descend_kernel(
    score_ptr, limit_ptr, fine_ptr, coarse_ptr, out_ptr, scratch_ptr, stride, num_fine, num_coarse, k,
    BITS: tl.constexpr, VECTOR: tl.constexpr, GROUP: tl.constexpr, COARSE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # GROUP is 64 (the coarse maxima are of 512) or 8 (the coarse ones are not used)
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limit_ptr + row).to(tl.int32)
    score_ptr += row * stride
    fine_ptr += row * num_fine
    out_ptr += row * k
    scratch_ptr += row * 3 * SLOTS
    fine_limit = tl.cdiv(limit, GROUP)
    place = _places(COARSE)
    if GROUP == 64:
        best = _load_scores(coarse_ptr + row * num_coarse, place, tl.cdiv(limit, 512), 1)
        least, top = _bounds(best, COARSE, SLOTS)
        # what k groups reach, k of their members reach
        parent, least = _narrow(best, place, least, top, scratch_ptr, k, BITS, SLOTS)
        best, place = _load_members(fine_ptr, parent, fine_limit)
        parent, least = _narrow(best, place, least, top, scratch_ptr + SLOTS, k, BITS, SLOTS)
        member = tl.maximum(parent, 0)[:, None] * 8 + tl.arange(0, 8)[None, :]
        best = _load_group_maxima(score_ptr, member, limit, VECTOR, SLOTS * 8)
        best = tl.where((parent >= 0)[:, None], best, float("-inf"))
        parent, least = _narrow(best, member, least, top, scratch_ptr + 2 * SLOTS, k, BITS, SLOTS)
    else:
        best = _load_scores(fine_ptr, place, fine_limit, 1)
        least, top = _bounds(best, COARSE, SLOTS)
        parent, least = _narrow(best, place, least, top, scratch_ptr, k, BITS, SLOTS)
    x, place = _load_members(score_ptr, parent, limit)
    _finish(x, place, least, top, score_ptr, out_ptr, k, BITS, False, SLOTS)


@dataclass(frozen=True, kw_only=True)
class SelectTiles:
    """How a selection is cut."""

    one_program: int = 16384
    """Entries of a row that one program looks at."""
    most_maxima: int = 16384
    """Group maxima that one program looks at in one step."""
    most_slots: int = 1024
    """Slots up to which groups of 64 are walked down; more slots take groups of 8."""
    num_warps: int = 8


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
    """Rows of more than one program: one pass for the maxima, one program a row for the rest."""
    num_rows, length = scores.shape
    device, stride, bits, vector = scores.device, scores.stride(0), 8 * scores.element_size(), _vector(scores)
    slots = triton.next_power_of_2(k)
    group = 64 if slots <= tiles.most_slots else 8
    num_fine, num_coarse = triton.cdiv(length, group), triton.cdiv(length, 8 * group)
    width = triton.next_power_of_2(num_coarse if group == 64 else num_fine)
    if width > tiles.most_maxima:
        raise ValueError(
            f"select_top: {length} columns with k={k} have {width} group maxima, more than {tiles.most_maxima}"
        )
    fine = torch.empty(num_rows, num_fine, dtype=scores.dtype, device=device)
    coarse = torch.empty(num_rows, num_coarse, dtype=scores.dtype, device=device)
    scratch = torch.empty(num_rows, 3, slots, dtype=torch.int32, device=device)
    count = 4096 // group
    _maxima_kernel[(triton.cdiv(num_fine, count), num_rows)](
        scores, visible, fine, coarse, stride, num_fine, num_coarse, VECTOR=vector, GROUP=group, COUNT=count,
        num_warps=4,
    )  # fmt: skip
    width = max(width, slots)
    _descend_kernel[(num_rows,)](
        scores, visible, fine, coarse, out, scratch, stride, num_fine, num_coarse, k, BITS=bits, VECTOR=vector,
        GROUP=group, COARSE=width, SLOTS=slots, num_warps=tiles.num_warps,
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
        blocks: [R, T / 8] int32: column 8 i + j stands for entry 8 blocks[i] + j.
        out: [R, k] int32 to write into.
        tiles: for tests and measurements.

    Returns:
        [R, k] int32, ascending, -1 (none) last.

    Raises:
        ValueError: shapes do not fit, or more columns than one program's group maxima.
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
    if block > max(tiles.one_program, slots) and blocks is None:
        _select_long(scores, visible, k, out, tiles)
        return out
    # reading groups first pays when it leaves a part of the row
    is_grouped = block >= 16 * slots
    scratch = torch.empty((num_rows, slots) if is_grouped else (0,), dtype=torch.int32, device=scores.device)
    _select_kernel[(num_rows,)](
        scores, visible, blocks, out, scratch, scores.stride(0), blocks.shape[1] if blocks is not None else 0, k,
        BITS=8 * scores.element_size(), VECTOR=_vector(scores), HAS_BLOCKS=blocks is not None, GROUPED=is_grouped,
        BLOCK=block, SLOTS=slots, num_warps=tiles.num_warps,
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
