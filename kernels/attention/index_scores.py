"""Indexer scores straight from the stored FP4 index rows: all visible entries, or the candidate blocks of each row.

score(p, j) = sum_h relu(q_ph . k_j) w_ph. A 4-bit code becomes an E4M3 byte (times 2^-6) by moving bits; one FP8 product
of 32 channels is exact, and the rows' group scales multiply its fp32 result. The queries' group scales are folded into
E4M3, exactly while those of one head lie within 2^14 of each other; head scales move into the weights.
Scores never mix rows or entries, so a score has the same bits in every batch.
Shapes: R rows, I index heads, C index channels, G = C / 32 scale groups, T score columns, M candidate blocks, P pages of
a context, N stored rows. Twins: kernels/attention/reference.py::index_scores_ref, candidate_blocks_ref;
kernels/quant/reference.py::decode_mxfp4.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from burnish.kernels.dispatch import is_interpreted, num_multiprocessors

GROUP = 32
"""Channels that share a scale."""
POOL_BLOCK = 8
"""Entries of a candidate block."""
_LEAST_HEADS = 16
"""Columns of the smallest product."""


@triton.jit
def _e4m3_byte(x):
    """E4M3 code of fp32 |x| <= 448 as int32, nearest for what lies below 2^-6; exact for two significant bits."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.abs(x)
    normal = ((bits & 0x7FFFFFFF) >> 20) - (120 << 3)
    small = (size * 512.0 + 0.5).to(tl.int32)
    return tl.where(size < 0.015625, small, normal) | sign


@triton.jit
def _fold_query_kernel(
    q_ptr, w_ptr, q8_ptr, w8_ptr, num_heads, C: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, c = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, C)
    mask = (h < num_heads)[:, None] & (c < C)[None, :]
    q = tl.load(q_ptr + row * num_heads * C + h[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    exponent = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.where(exponent == 0, 127, tl.maximum(exponent, 10))
    # the largest magnitude of a head lands in [256, 448)
    up = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    code = _e4m3_byte(q * up[:, None])
    # even channels of a group first: the low nibbles of the stored bytes
    place = (c // 32) * (HEADS * 32) + (c % 2) * 16 + (c % 32) // 2
    at = row * (GROUPS * HEADS * 32) + h[:, None] * 32 + place[None, :]
    tl.store(q8_ptr + at, code.to(tl.uint8))
    w = tl.load(w_ptr + row * num_heads + h, mask=h < num_heads, other=0.0).to(tl.float32)
    # 2^6 undoes the 2^-6 of the keys' bytes
    tl.store(w8_ptr + row * HEADS + h, w * (down * 64.0))


@triton.jit
def _load_group(q_ptr, row, n, g: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr):
    """[32, columns] E4M3: one group's channels of the queries of a program."""
    c = tl.arange(0, 32)
    at = (row + n // HEADS) * (GROUPS * HEADS * 32) + g * (HEADS * 32) + (n % HEADS) * 32
    return tl.load(q_ptr + at[None, :] + c[:, None]).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _unpack(packed, ASM: tl.constexpr):
    """Two E2M1 codes a byte -> two E4M3 bytes (low nibble, high nibble), each the code's value times 2^-6."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            and.b32 a, $2, 0x08080808;
            and.b32 b, $2, 0x07070707;
            shl.b32 a, a, 4;
            shl.b32 b, b, 2;
            or.b32 $0, a, b;
            shr.u32 a, $2, 2;
            and.b32 a, a, 0x1c1c1c1c;
            and.b32 b, $2, 0x80808080;
            or.b32 $1, a, b;
            }
            """,
            "=r,=r,r",
            [packed],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed & 0x08) << 4) | ((packed & 0x07) << 2)
        high = (packed & 0x80) | ((packed & 0x70) >> 2)
    return low, high


@triton.jit
def _scale_value(byte):
    """E8M0 byte -> 2^(byte - 127); byte 0 belongs to rows of zeros."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _product_order(x, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr):
    """The rows of x [BLOCK_K, COLUMNS] in another order, eight neighbours staying neighbours.

    Loads give warp w the rows 8 w + 8 WARPS i, the product's first operand lives in its warp as rows 16 w + 8 i: named
    so, the rows are where they are needed, and no value moves between threads.
    """
    x = tl.reshape(x, (BLOCK_K // (16 * WARPS), 2, WARPS, 8, COLUMNS))
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 4)), (BLOCK_K, COLUMNS))


@triton.jit
def _locate(
    table_ptr, blocks_ptr, tile, most, M,
    ENTRIES_PER_PAGE: tl.constexpr, ROW_BYTES: tl.constexpr, BLOCK_K: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """(entry, byte offset of its stored row) of the columns of one tile; an entry from `most` on has no row."""
    j = tl.arange(0, BLOCK_K)
    k = tile * BLOCK_K + j
    # page and row are not multiplied as one number: the compiler would take rows for better aligned than to 4 bytes
    if GATHER:
        block = tl.load(blocks_ptr + k // 8, mask=k < M * 8, other=-1)
        entry = tl.where(block < 0, most, block * 8 + k % 8)
        page = tl.load(table_ptr + entry // ENTRIES_PER_PAGE, mask=entry < most, other=0).to(tl.int64)
        offset = page * (ENTRIES_PER_PAGE * ROW_BYTES) + (entry % ENTRIES_PER_PAGE) * ROW_BYTES
    elif ENTRIES_PER_PAGE % BLOCK_K == 0:
        entry = k
        first = tile * BLOCK_K
        page = tl.load(table_ptr + first // ENTRIES_PER_PAGE, mask=first < most, other=0).to(tl.int64)
        offset = page * (ENTRIES_PER_PAGE * ROW_BYTES) + (first % ENTRIES_PER_PAGE + j) * ROW_BYTES
    else:
        entry = k
        page = tl.load(table_ptr + entry // ENTRIES_PER_PAGE, mask=entry < most, other=0).to(tl.int64)
        offset = page * (ENTRIES_PER_PAGE * ROW_BYTES) + (entry % ENTRIES_PER_PAGE) * ROW_BYTES
    return entry, offset


@triton.jit
def _load_packed(base, is_key, g: tl.constexpr):
    return tl.load(base[:, None] + (g * 16 + tl.arange(0, 16))[None, :], mask=is_key[:, None], other=0)


@triton.jit
def _load_rows(rows_ptr, offset, is_key, GROUPS: tl.constexpr):
    """The packed codes of each group [BLOCK_K, 16], and the group scales as one word."""
    base = rows_ptr + offset
    p0 = _load_packed(base, is_key, 0)
    p1, p2, p3 = p0, p0, p0
    scales = base + GROUPS * 16
    if GROUPS == 4:
        p1, p2, p3 = _load_packed(base, is_key, 1), _load_packed(base, is_key, 2), _load_packed(base, is_key, 3)
        word = tl.load(scales.to(tl.pointer_type(tl.uint32)), mask=is_key, other=0)
    else:
        word = tl.load(scales, mask=is_key, other=0).to(tl.uint32)
        if GROUPS == 2:
            p1 = _load_packed(base, is_key, 1)
            word |= tl.load(scales + 1, mask=is_key, other=0).to(tl.uint32) << 8
    return p0, p1, p2, p3, word


@triton.jit
def _group_dots(packed, word, q, g: tl.constexpr, ASM: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr):
    """[BLOCK_K, columns of q] in product order: exact products of one scale group, times the rows' scales."""
    low, high = _unpack(packed, ASM)
    keys = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BLOCK_K, 32))
    keys = _product_order(keys, 32, BLOCK_K, WARPS)
    # E8M0 byte b is 2^(b - 127); byte 0 belongs to rows of zeros
    scale = (((word >> (8 * g)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    return tl.dot(keys.to(tl.float8e4nv, bitcast=True), q) * scale


@triton.jit
def _index_scores_kernel(
    q_ptr, w_ptr, rows_ptr, table_ptr, context_ptr, visible_ptr, blocks_ptr, score_ptr, max_ptr,
    T, P, M, TILES,
    ENTRIES_PER_PAGE: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, GATHER: tl.constexpr, BLOCK_MAX: tl.constexpr,
    PIN: tl.constexpr, ROUND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS
    n, own = tl.arange(0, ROWS * HEADS), tl.arange(0, ROWS)
    visible = tl.load(visible_ptr + row + own).to(tl.int32)  # [ROWS]
    most = tl.max(visible, 0)
    table_ptr += tl.load(context_ptr + row).to(tl.int64) * P
    columns = most
    if GATHER:
        columns = M * 8
        blocks_ptr += row * M
    first = tl.program_id(0) * TILES
    last = tl.minimum(first + TILES, tl.cdiv(columns, BLOCK_K))
    entry, offset = _locate(table_ptr, blocks_ptr, first, most, M, ENTRIES_PER_PAGE, ROW_BYTES, BLOCK_K, GATHER)
    w = tl.load(w_ptr + row * HEADS + n)
    q0 = _load_group(q_ptr, row, n, 0, HEADS, GROUPS)
    if GROUPS > 1:
        q1 = _load_group(q_ptr, row, n, 1, HEADS, GROUPS)
    if GROUPS > 2:
        q2 = _load_group(q_ptr, row, n, 2, HEADS, GROUPS)
        q3 = _load_group(q_ptr, row, n, 3, HEADS, GROUPS)
    for tile in range(first, last):
        p0, p1, p2, p3, word = _load_rows(rows_ptr, offset, entry < most, GROUPS)
        # where the next tile lies is looked up while this one is scored
        entry1, offset = _locate(table_ptr, blocks_ptr, tile + 1, most, M, ENTRIES_PER_PAGE, ROW_BYTES, BLOCK_K, GATHER)
        word = _product_order(word[:, None], 1, BLOCK_K, WARPS)  # [BLOCK_K, 1]
        dots = _group_dots(p0, word, q0, 0, ASM, BLOCK_K, WARPS)
        if GROUPS > 1:
            dots += _group_dots(p1, word, q1, 1, ASM, BLOCK_K, WARPS)
        if GROUPS > 2:
            dots += _group_dots(p2, word, q2, 2, ASM, BLOCK_K, WARPS)
            dots += _group_dots(p3, word, q3, 3, ASM, BLOCK_K, WARPS)
        if ROUND:
            dots = dots.to(tl.bfloat16).to(tl.float32)
        weighted = tl.maximum(dots, 0.0) * w[None, :]
        if ROUND:
            weighted = weighted.to(tl.bfloat16).to(tl.float32)
        score = tl.sum(tl.reshape(weighted, (BLOCK_K, ROWS, HEADS)), 2)  # [BLOCK_K, ROWS]
        if ROUND:
            score = score.to(tl.bfloat16).to(tl.float32)
        k = _product_order((tile * BLOCK_K + tl.arange(0, BLOCK_K))[:, None], 1, BLOCK_K, WARPS)  # [BLOCK_K, 1]
        seen = _product_order(entry[:, None], 1, BLOCK_K, WARPS) < visible[None, :]
        score = tl.where(seen, score, float("-inf"))
        at = (row + own)[None, :] * T + k
        tl.store(score_ptr + at, score.to(score_ptr.dtype.element_ty), mask=k < T)
        if BLOCK_MAX:
            best = tl.max(tl.reshape(score, (BLOCK_K // 8, 8, ROWS)), 1)
            block = tl.max(tl.reshape(k, (BLOCK_K // 8, 8)), 1)[:, None] // 8
            if PIN:
                best = tl.where(block == ((visible - 1) // 8)[None, :], float("inf"), best)
            at = (row + own)[None, :] * (T // 8) + block
            tl.store(max_ptr + at, best.to(max_ptr.dtype.element_ty), mask=block < T // 8)
        entry = entry1


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The stored index keys that rows are scored against."""

    rows: torch.Tensor
    """[N, C/2 + C/32] uint8, packed E2M1 then E8M0 scales; contiguous."""
    table: torch.Tensor
    """[contexts, P] int32, pages of each context."""
    entries_per_page: int


@dataclass(frozen=True, kw_only=True)
class ScoreTiles:
    """How a launch is cut."""

    block_k: int = 64
    """Entries of one step."""
    num_warps: int = 4
    programs_per_processor: int = 7
    asm: bool = True
    """Unpack four bytes at once by inline assembly; the interpreter never does."""


def fold_query(query: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4-rounded queries as the E4M3 operand of the product.

    Args:
        query: [R, I, C], C a multiple of 32.
        weights: [R, I].

    Returns:
        [R, G, heads, 32] uint8 and [R, heads] fp32, heads = I padded to a power of two of at least 16.
    """
    num_rows, heads, channels = query.shape
    padded = max(_LEAST_HEADS, triton.next_power_of_2(heads))
    groups = channels // GROUP
    q8 = torch.empty(num_rows, groups, padded, GROUP, dtype=torch.uint8, device=query.device)
    w8 = torch.empty(num_rows, padded, dtype=torch.float32, device=query.device)
    if num_rows:
        _fold_query_kernel[(num_rows, padded // 8)](
            query.contiguous(), weights.contiguous(), q8, w8, heads, C=channels, HEADS=padded, GROUPS=groups, BLOCK_H=8,
            num_warps=2,
        )  # fmt: skip
    return q8, w8


def _check(query: torch.Tensor, weights: torch.Tensor, keys: Keys, rows_per_program: int) -> None:
    channels = query.shape[-1]
    if query.dim() != 3 or channels not in (32, 64, 128):
        raise ValueError(f"index_scores: query must be [R, I, 32, 64 or 128], got {tuple(query.shape)}")
    if weights.shape != query.shape[:2]:
        raise ValueError(f"index_scores: weights must be {tuple(query.shape[:2])}, got {tuple(weights.shape)}")
    row_bytes = channels // 2 + channels // GROUP
    if keys.rows.dtype != torch.uint8 or keys.rows.shape[-1] != row_bytes or not keys.rows.is_contiguous():
        raise ValueError(
            f"index_scores: rows must be contiguous uint8 [N, {row_bytes}] for {channels} channels, "
            f"got {keys.rows.dtype} {tuple(keys.rows.shape)}"
        )
    if query.shape[0] % rows_per_program:
        raise ValueError(
            f"index_scores: {query.shape[0]} rows are not a multiple of rows_per_program={rows_per_program}"
        )


def index_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: Keys,
    context: torch.Tensor,
    visible: torch.Tensor,
    length: int,
    *,
    blocks: torch.Tensor | None = None,
    block_max: bool = False,
    pin_newest: bool = False,
    rounds: bool = False,
    rows_per_program: int = 1,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    tiles: ScoreTiles = ScoreTiles(),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Score rows against the entries they may see.

    Args:
        query: [R, I, C] rounded to MXFP4.
        weights: [R, I], scaled already.
        keys: the cache.
        context: [R] int, row of `keys.table`.
        visible: [R] int, entries a row may see (the first ones of its context).
        length: no less than the largest `visible`; rounded up to a multiple of 8 it is T. Ignored with `blocks`.
        blocks: [R, M] int32 candidate blocks, ascending, -1 last: column 8 i + j is entry 8 blocks[i] + j, T = 8 M.
        block_max: also the maximum of every 8 columns.
        pin_newest: the block of the newest visible entry gets +inf there.
        rounds: round products, weighted heads and scores to bf16, as a bf16 model in plain torch does.
        rows_per_program: rows that share the keys they read: all rows of an aligned group are of one context.
        out: tensors to write into.

    Returns:
        scores [R, T] in query.dtype and block maxima [R, T / 8] or None. Columns of invisible entries hold -inf up to
        the next multiple of the tile; what lies behind is not written: `visible` limits what may be read.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(query, weights, keys, rows_per_program)
    num_rows, _, channels = query.shape
    if blocks is not None:
        length, rows_per_program = POOL_BLOCK * blocks.shape[1], 1
    width = triton.cdiv(length, POOL_BLOCK) * POOL_BLOCK
    if out is None:
        scores = torch.empty(num_rows, width, dtype=query.dtype, device=query.device)
        best = torch.empty(num_rows, width // POOL_BLOCK, dtype=query.dtype, device=query.device) if block_max else None
    else:
        scores, best = out
    if not num_rows or not width:
        return scores, best
    q8, w8 = fold_query(query, weights)
    programs = triton.cdiv(num_multiprocessors(query) * tiles.programs_per_processor, num_rows // rows_per_program)
    num_tiles = triton.cdiv(width, tiles.block_k)
    tiles_each = triton.cdiv(num_tiles, programs)
    _index_scores_kernel[(triton.cdiv(num_tiles, tiles_each), num_rows // rows_per_program)](
        q8, w8, keys.rows, keys.table, context, visible, blocks, scores, best,
        width, keys.table.shape[1], blocks.shape[1] if blocks is not None else 0, tiles_each,
        ENTRIES_PER_PAGE=keys.entries_per_page, ROW_BYTES=keys.rows.shape[1], GROUPS=channels // GROUP,
        HEADS=q8.shape[2], ROWS=rows_per_program, BLOCK_K=tiles.block_k, WARPS=tiles.num_warps, GATHER=blocks is not None,
        BLOCK_MAX=block_max, PIN=pin_newest, ROUND=rounds, ASM=tiles.asm and not is_interpreted(),
        num_warps=tiles.num_warps, num_stages=1,
    )  # fmt: skip
    return scores, best
