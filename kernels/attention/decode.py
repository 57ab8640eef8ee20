"""Sparse decode attention over the cache's own bytes: FP8 window rows and FP4 main rows, gathered and unpacked in place.

One program takes one query row and a range of its key blocks (split-K); key and value are one latent, so one unpacked
tile serves both products. Channels are kept as even and odd halves, the two nibbles of a byte, so that nothing is
interleaved at run time: queries are read and outputs written as 32-bit words of two bf16.
Shapes: R query rows, H heads, C channels, K selected entries, W window slots, P splits. Twin: reference.py of this
folder, over rows decoded by kernels/quant.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from burnish.kernels.attention.reference import sink_attention_ref
from burnish.kernels.dispatch import is_interpreted, use_reference
from burnish.kernels.quant.bits import e2m1_value, e4m3_value, e8m0_value, load_pairs, spread, store_pairs
from burnish.kernels.quant.reference import read_rows_ref
from burnish.kernels.quant.write import check_table

_FOLD = tl.constexpr(2.0**8)
"""Keys of the 16-bit form are 2^-8 times their value: no power of two lifts an E2M1 value from 2^-126 in one step."""
_TWO_118 = tl.constexpr(2.0**118)
_TWO_112 = tl.constexpr(2.0**112)
# per 32-bit word of four bytes: two lanes b << 8 each, then sign to bit 15 and code to bits 8..6
_UNPACK = tl.constexpr("""{
.reg .b32 t, u, v;
prmt.b32 t, $4, 0, 0x1404;
and.b32 u, t, 0x80008000; shr.b32 v, t, 6; and.b32 v, v, 0x01C001C0; or.b32 $2, u, v;
shl.b32 u, t, 4; and.b32 u, u, 0x80008000; shr.b32 v, t, 2; and.b32 v, v, 0x01C001C0; or.b32 $0, u, v;
prmt.b32 t, $4, 0, 0x3424;
and.b32 u, t, 0x80008000; shr.b32 v, t, 6; and.b32 v, v, 0x01C001C0; or.b32 $3, u, v;
shl.b32 u, t, 4; and.b32 u, u, 0x80008000; shr.b32 v, t, 2; and.b32 v, v, 0x01C001C0; or.b32 $1, u, v;
}""")


@triton.jit
def unpack_nibbles(byte, ASM: tl.constexpr):
    """Bytes of two E2M1 codes -> (low, high) values times 2^-126, bf16."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [byte], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        code = byte.to(tl.int16)
        low = (((code & 7) << 6) | ((code & 8) << 12)).to(tl.bfloat16, bitcast=True)
        high = (((code & 0x70) << 2) | ((code & 0x80) << 8)).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def main_tile(
    table_ptr, slot, known, PAIRS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Even and odd channels [BLOCK, WORDS] of FP4 rows: fp32 values when WIDE, else bf16 values times 2^-8."""
    GROUP: tl.constexpr = 8  # pairs of one scale
    word = tl.arange(0, WORDS)[None, :]
    group = tl.arange(0, WORDS // GROUP)[None, :]
    base = table_ptr + slot[:, None] * (PAIRS + PAIRS // GROUP)
    code = tl.load(base + PAIRS + group, mask=known[:, None] & (group < PAIRS // GROUP), other=0)
    scale = e4m3_value(code.to(tl.int32))
    byte = tl.load(base + word) if WORDS == PAIRS else tl.load(base + word, mask=word < PAIRS, other=0)
    if WIDE:
        wide = spread(scale, BLOCK, WORDS)
        byte = byte.to(tl.int32)
        even, odd = e2m1_value(byte & 15) * wide, e2m1_value(byte >> 4) * wide
    else:
        wide = spread((scale * _TWO_118).to(tl.bfloat16), BLOCK, WORDS)
        low, high = unpack_nibbles(byte, ASM)
        even, odd = low * wide, high * wide
    return even, odd


@triton.jit
def window_tile(
    ring_ptr, slot, known, PAIRS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Even and odd channels [BLOCK, WORDS] of FP8 rows: fp32 values when WIDE, else bf16 values times 2^-8."""
    GROUP: tl.constexpr = 16
    group = tl.arange(0, WORDS // GROUP)[None, :]
    base = ring_ptr + slot[:, None] * (2 * PAIRS + PAIRS // GROUP)
    code = tl.load(base + 2 * PAIRS + group, mask=known[:, None] & (group < PAIRS // GROUP), other=0)
    scale = e8m0_value(code.to(tl.int32))
    channel = tl.arange(0, 2 * WORDS)[None, :]
    byte = tl.load(base + channel) if WORDS == PAIRS else tl.load(base + channel, mask=channel < 2 * PAIRS, other=0)
    low, high = tl.split(tl.reshape(byte, (BLOCK, WORDS, 2)))
    if WIDE:
        wide = spread(scale, BLOCK, WORDS)
        even, odd = e4m3_value(low.to(tl.int32)) * wide, e4m3_value(high.to(tl.int32)) * wide
    else:
        # an E4M3 code is a bf16 value times 2^-120; one factor for both steps could overflow
        wide = spread(scale.to(tl.bfloat16), BLOCK, WORDS)
        lift = tl.full((BLOCK, WORDS), _TWO_112, tl.bfloat16)
        low, high = low.to(tl.int16), high.to(tl.int16)
        even = (((low & 0x7F) << 4) | ((low & 0x80) << 8)).to(tl.bfloat16, bitcast=True) * lift * wide
        odd = (((high & 0x7F) << 4) | ((high & 0x80) << 8)).to(tl.bfloat16, bitcast=True) * lift * wide
    return even, odd


@triton.jit
def attend(q_even, q_odd, even, odd, known, scale, acc_even, acc_odd, top, total):
    """One key block through the online softmax in units of log2; `scale` holds log2(e) and the keys' factor."""
    logits = tl.dot(q_even, tl.trans(even), input_precision="ieee")
    logits = tl.dot(q_odd, tl.trans(odd), logits, input_precision="ieee") * scale
    logits = tl.where(known[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    # while no key is known the reference point is 0: -inf minus -inf has no value
    point = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - point)
    probs = tl.exp2(logits - point[:, None])
    total = total * shrink + tl.sum(probs, 1)
    probs = probs.to(even.dtype)
    acc_even = tl.dot(probs, even, acc_even * shrink[:, None], input_precision="ieee")
    acc_odd = tl.dot(probs, odd, acc_odd * shrink[:, None], input_precision="ieee")
    return acc_even, acc_odd, new_top, total


@triton.jit
def _decode_kernel(
    q_ptr, ring_ptr, window_ptr, table_ptr, selected_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr,
    num_window, num_selected, scale,
    H: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, BF16: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, word = tl.arange(0, HEADS)[:, None], tl.arange(0, WORDS)[None, :]
    inside = (head < H) & (word < PAIRS)
    q_even, q_odd = load_pairs(q_ptr, (row * H + head) * PAIRS + word, inside, BF16)
    if not WIDE:
        q_even, q_odd = q_even.to(tl.bfloat16), q_odd.to(tl.bfloat16)
        scale = scale * _FOLD
    acc_even = tl.zeros((HEADS, WORDS), tl.float32)
    acc_odd = tl.zeros((HEADS, WORDS), tl.float32)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    place = tl.arange(0, BLOCK)
    # blocks of the window come first, then those of the selected entries; a split takes a range of both
    window_blocks = tl.cdiv(num_window, BLOCK)
    num_blocks = window_blocks + tl.cdiv(num_selected, BLOCK)
    first, last = split * num_blocks // SPLITS, (split + 1) * num_blocks // SPLITS
    for block in range(tl.minimum(first, window_blocks), tl.minimum(last, window_blocks)):
        key = block * BLOCK + place
        slot = tl.load(window_ptr + row * num_window + key, mask=key < num_window, other=-1).to(tl.int64)
        known = slot >= 0
        even, odd = window_tile(ring_ptr, tl.maximum(slot, 0), known, PAIRS, WORDS, BLOCK, WIDE)
        acc_even, acc_odd, top, total = attend(
            q_even, q_odd, even, odd, known, scale, acc_even, acc_odd, top, total
        )  # fmt: skip
    for block in range(tl.maximum(first - window_blocks, 0), tl.maximum(last - window_blocks, 0)):
        key = block * BLOCK + place
        slot = tl.load(selected_ptr + row * num_selected + key, mask=key < num_selected, other=-1).to(tl.int64)
        known = slot >= 0
        even, odd = main_tile(table_ptr, tl.maximum(slot, 0), known, PAIRS, WORDS, BLOCK, WIDE, ASM)
        acc_even, acc_odd, top, total = attend(
            q_even, q_odd, even, odd, known, scale, acc_even, acc_odd, top, total
        )  # fmt: skip
    if SPLITS == 1:
        sink = tl.load(sink_ptr + tl.arange(0, HEADS), mask=tl.arange(0, HEADS) < H, other=0.0) * 1.4426950408889634
        point = tl.maximum(top, sink)
        shrink = tl.exp2(top - point)
        norm = shrink / (total * shrink + tl.exp2(sink - point))
        if not WIDE:
            norm = norm * _FOLD
        offset = (row * H + head) * PAIRS + word
        store_pairs(out_ptr, offset, inside, acc_even * norm[:, None], acc_odd * norm[:, None], BF16, NATIVE)
    else:
        norm = tl.where(total == 0, 0.0, 1.0 / total)
        if not WIDE:
            norm = norm * _FOLD
        part = row * SPLITS + split
        offset = (part * H + head) * PAIRS + word
        store_pairs(part_ptr, offset, inside, acc_even * norm[:, None], acc_odd * norm[:, None], BF16, NATIVE)
        heads = tl.arange(0, HEADS)
        tl.store(lse_ptr + part * H + heads, top + tl.log2(total), mask=heads < H)


@triton.jit
def _combine_kernel(
    part_ptr, lse_ptr, sink_ptr, out_ptr,
    H: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    BF16: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < H
    word = tl.arange(0, WORDS)[None, :]
    inside = is_head[:, None] & (word < PAIRS)
    point = tl.load(sink_ptr + head, mask=is_head, other=0.0) * 1.4426950408889634
    sink = point
    for split in tl.static_range(SPLITS):
        lse = tl.load(lse_ptr + (row * SPLITS + split) * H + head, mask=is_head, other=float("-inf"))
        point = tl.maximum(point, lse)
    total = tl.exp2(sink - point)
    even = tl.zeros((HEADS, WORDS), tl.float32)
    odd = tl.zeros((HEADS, WORDS), tl.float32)
    for split in tl.static_range(SPLITS):
        part = row * SPLITS + split
        share = tl.exp2(tl.load(lse_ptr + part * H + head, mask=is_head, other=float("-inf")) - point)
        total += share
        part_even, part_odd = load_pairs(part_ptr, (part * H + head[:, None]) * PAIRS + word, inside, BF16)
        even += part_even * share[:, None]
        odd += part_odd * share[:, None]
    even, odd = even / total[:, None], odd / total[:, None]
    store_pairs(out_ptr, (row * H + head[:, None]) * PAIRS + word, inside, even, odd, BF16, NATIVE)


class Shape(NamedTuple):
    """How a launch cuts its work."""

    splits: int
    """Programs a query row."""
    block: int = 64
    """Keys a step; the Hopper form has 64."""
    warps: int = 8
    stages: int = 2
    form: str = "plain"
    """"plain" Triton; for 64 heads of 512 channels in bf16 "hopper" (Gluon), or "staged" (Gluon, not yet measured)."""


def plan(num_rows: int, num_keys: int, form: str = "plain", num_processors: int = 132) -> Shape:
    """Splits that fill the GPU without cutting a row into less than one block of 64 keys."""
    blocks = -(-num_keys // 64)
    return Shape(splits=max(1, min(blocks, num_processors // max(1, num_rows))), form=form)


def _fits(shape: Shape, is_bf16: bool) -> Shape:
    """fp32 keys of 512 channels leave room in shared memory for 16 of them."""
    return shape if is_bf16 else shape._replace(block=min(shape.block, 16), stages=1)


def _best_form(q: torch.Tensor, window: torch.Tensor, selected: torch.Tensor) -> str:
    """The Hopper form where it fits."""
    fits = q.shape[1:] == (64, 512) and window.shape[1] <= 128 and selected.shape[1] <= 512
    if not fits or q.dtype is not torch.bfloat16 or not q.is_cuda:
        return "plain"
    return "hopper" if torch.cuda.get_device_capability(q.device) == (9, 0) else "plain"


def _launch_gluon(
    shape: Shape,
    q: torch.Tensor,
    ring: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    selected: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> None:
    """One of the forms for Hopper; `q` and `out` as 32-bit words."""
    sizes = (window.shape[1], selected.shape[1], scale * math.log2(math.e))
    ring_words, table_words = ring.view(torch.int32), table.view(torch.int32)
    if shape.form == "staged":
        from burnish.kernels.attention.decode_staged import decode_kernel

        tables = (ring_words, ring, window, table_words, selected)
    else:
        from burnish.kernels.attention.decode_hopper import decode_kernel

        tables = (ring_words, ring, window, table_words, table, selected)
    decode_kernel[(len(q), shape.splits)](q, *tables, sink, out, lse, *sizes, SPLITS=shape.splits, num_warps=4)


def decode_attention_ref(
    q: torch.Tensor,
    ring: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    selected: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The twin: rows decoded, then attention over window slots and entries; arguments as `decode_attention`."""
    num_rows, _, channels = q.shape
    keys = [
        read_rows_ref(rows, form, channels, slots=slots.flatten()).view(num_rows, -1, channels)
        for rows, form, slots in ((ring, "fp8", window), (table, "nvfp4", selected))
    ]
    valid = torch.cat((window, selected), 1) >= 0
    return sink_attention_ref(q, torch.cat(keys, 1).to(q.dtype), valid, sink, scale)


def decode_attention(
    q: torch.Tensor,
    ring: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    selected: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    shape: Shape | None = None,
    asm: bool | None = None,
) -> torch.Tensor:
    """Attention of query rows over their window keys and selected entries, straight from stored bytes.

    Any number of query rows may belong to one request: each brings its own slots.

    Args:
        q: [R, H, C] bf16 or fp32.
        ring: [slots, C + C/32] uint8, FP8 window rows.
        window: [R, W] int32 slots of `ring`, -1 for none.
        table: [entries, C/2 + C/16] uint8, FP4 main rows.
        selected: [R, K] int32 slots of `table`, -1 for none.
        sink: [H] fp32 logit of the virtual key.
        scale: factor on the dot products.
        out: [R, H, C] to write into.
        shape: how the work is cut; default `plan`.
        asm: unpack by inline assembly; default on a GPU.

    Returns:
        [R, H, C] in q.dtype; zeros for a row without a key.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    num_rows, heads, channels = q.shape
    check_table("decode_attention", ring, "fp8", channels)
    check_table("decode_attention", table, "nvfp4", channels)
    for name, slots in (("window", window), ("selected", selected)):
        if slots.dim() != 2 or len(slots) != num_rows or slots.dtype is not torch.int32 or not slots.is_contiguous():
            raise ValueError(
                f"decode_attention: {name} must be contiguous int32 [{num_rows}, slots], got {slots.dtype} {list(slots.shape)}"
            )
    if q.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"decode_attention: q must be bfloat16 or float32, got {q.dtype}")
    if out is None:
        out = torch.empty_like(q)
    if use_reference(q):
        return out.copy_(decode_attention_ref(q, ring, window, table, selected, sink, scale))
    if num_rows == 0:
        return out
    q = q.contiguous()
    is_bf16 = q.dtype is torch.bfloat16
    shape = shape or plan(num_rows, window.shape[1] + selected.shape[1], _best_form(q, window, selected))
    shape = _fits(shape, is_bf16)
    part, lse = out, sink
    if shape.splits > 1:
        part = torch.empty(num_rows * shape.splits, heads, channels, dtype=q.dtype, device=q.device)
        lse = torch.empty(num_rows * shape.splits, heads, dtype=torch.float32, device=q.device)
    words = [value.view(torch.int32) if is_bf16 else value for value in (q, out, part)]
    pairs, num_words = channels // 2, max(16, triton.next_power_of_2(channels // 2))
    native = not is_interpreted()
    if shape.form in ("hopper", "staged"):
        _launch_gluon(shape, words[0], ring, window, table, selected, sink, words[2], lse, scale)
    else:
        _decode_kernel[(num_rows, shape.splits)](
            words[0], ring, window, table, selected, sink, words[1], words[2], lse,
            window.shape[1], selected.shape[1], scale * math.log2(math.e),
            H=heads, HEADS=max(16, triton.next_power_of_2(heads)), PAIRS=pairs, WORDS=num_words, SPLITS=shape.splits,
            BLOCK=shape.block, BF16=is_bf16, WIDE=not (is_bf16 and native),
            ASM=is_bf16 and native if asm is None else asm, NATIVE=native,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    if shape.splits > 1:
        # a few rows: one head a program, so that all multiprocessors share the reading
        block = 1 if num_rows < 4 else 2 if num_rows < 16 else 8
        _combine_kernel[(num_rows, triton.cdiv(heads, block))](
            words[2], lse, sink, words[1],
            H=heads, PAIRS=pairs, WORDS=num_words, SPLITS=shape.splits, HEADS=block, BF16=is_bf16, NATIVE=native,
            num_warps=max(2, block // 2),
        )  # fmt: skip
    return out
