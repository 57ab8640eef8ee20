"""Rows of the caches written from activations: norm, rotation, rounding, packing and scatter in one pass.

What the model does one after another (norm, cast, rotate, cast, quantise, pack, store in a slot) is one read of the
projection's output and one write of its row. Shapes: N rows, C channels, P rotated pairs, S slots of a table.
Twin: reference.py of this folder.
"""

import torch
import triton
import triton.language as tl

from burnish.kernels.dispatch import is_interpreted, use_reference
from burnish.kernels.quant.bits import (
    FP8,
    MXFP4,
    NVFP4,
    bits_float,
    encode_fp4,
    encode_fp8,
    load_pairs,
    pack_bf16,
    store_pairs,
    unpack_bf16,
)
from burnish.kernels.quant.reference import GROUPS, row_bytes, write_rows_ref

FORMS = {"fp8": FP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
"""Form -> what the kernels call it."""
_CHUNK_WORDS = 64


@triton.jit
def squares(word):
    """Even and odd values of words of two bf16 as positive fp64, built from their bits: conversions are slow.

    A zero becomes 2^-127, whose square no fp32 mean can see.
    """
    even = ((word & 0x7FFF) << 13) + 0x38000000
    odd = ((word >> 3) & 0x0FFFE000) + 0x38000000
    return (even.to(tl.int64) << 32).to(tl.float64, bitcast=True), (odd.to(tl.int64) << 32).to(tl.float64, bitcast=True)


@triton.jit
def inverse_rms(squared, eps, CHANNELS: tl.constexpr):
    """1 / RMS [ROWS, 1] from partial sums of squares [ROWS, W] fp64."""
    total = tl.sum(squared, axis=1, keep_dims=True)
    mean = (total * (1.0 / CHANNELS) if CHANNELS & (CHANNELS - 1) == 0 else total / CHANNELS).to(tl.float32)
    return tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def row_rstd(
    ptr, first, live, eps,
    PAIRS: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """1 / RMS [ROWS, 1] of rows of PAIRS pairs that start at pair `first` [ROWS, 1].

    The mean is summed in fp64, so that its fp32 value does not depend on the order of the sum.
    """
    total = tl.zeros((ROWS, CHUNK), tl.float64)
    for chunk in tl.static_range(0, WORDS // CHUNK):
        word = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        mask = live & (word < PAIRS)
        if BF16:
            even, odd = squares(tl.load(ptr + first + word, mask=mask, other=0))
        else:
            even, odd = load_pairs(ptr, first + word, mask, False)
            even, odd = even.to(tl.float64), odd.to(tl.float64)
        total = tl.fma(odd, odd, tl.fma(even, even, total))
    return inverse_rms(total, eps, 2 * PAIRS)


@triton.jit
def round_pairs(even, odd, BF16: tl.constexpr, NATIVE: tl.constexpr):
    """To the nearest bf16 when the model computes in bf16."""
    if BF16:
        even, odd = unpack_bf16(pack_bf16(even, odd, NATIVE))
    return even, odd


@triton.jit
def rotate_pairs(even, odd, rotation_ptr, row, live, pair, PAIRS: tl.constexpr):
    """Pairs [ROWS, W] turned by their row's factor; `pair` [1, W] counts from the first rotated pair, others stay."""
    turns = (pair >= 0) & (pair < PAIRS)
    factor = tl.load(rotation_ptr + row * PAIRS + pair, mask=live & turns, other=0)
    real, imaginary = bits_float(factor.to(tl.int32)), bits_float((factor >> 32).to(tl.int32))
    turned_even, turned_odd = even * real - odd * imaginary, even * imaginary + odd * real
    return tl.where(turns, turned_even, even), tl.where(turns, turned_odd, odd)


@triton.jit
def store_rows(
    table_ptr, slot, live, even, odd, first,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    BF16: tl.constexpr, STORED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Encode pairs first .. first + WORDS of rows of PAIRS pairs into their slots; `slot`, `live` are [ROWS, 1]."""
    PAYLOAD: tl.constexpr = 2 * PAIRS if FORM == FP8 else PAIRS
    GROUPS_A_ROW: tl.constexpr = 2 * PAIRS // GROUP
    base = table_ptr + slot * (PAYLOAD + GROUPS_A_ROW)
    if FORM == FP8:
        even_code, odd_code, scale_code = encode_fp8(even, odd, ROWS, WORDS, GROUP, STORED, NATIVE)
        byte = tl.reshape(tl.join(even_code.to(tl.uint8), odd_code.to(tl.uint8)), (ROWS, 2 * WORDS))
        place = 2 * first + tl.arange(0, 2 * WORDS)[None, :]
    else:
        byte, scale_code = encode_fp4(even, odd, ROWS, WORDS, GROUP, FORM, BF16, STORED, NATIVE)
        byte, place = byte.to(tl.uint8), first + tl.arange(0, WORDS)[None, :]
    tl.store(base + place, byte, mask=live & (place < PAYLOAD))
    group = 2 * first // GROUP + tl.arange(0, 2 * WORDS // GROUP)[None, :]
    tl.store(base + PAYLOAD + group, scale_code.to(tl.uint8), mask=live & (group < GROUPS_A_ROW))


@triton.jit
def _write_rows_kernel(
    x_ptr, weight_ptr, rotation_ptr, slot_ptr, table_ptr, normed_ptr, num_rows, eps,
    PAIRS: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, NORM: tl.constexpr, KEEPS: tl.constexpr, SCATTER: tl.constexpr, BF16: tl.constexpr,
    WEIGHT_BF16: tl.constexpr, STORED: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # offsets inside a program are 32-bit, the program's own start is 64-bit
    start = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    live = row < num_rows - start
    x_ptr += start * (PAIRS if BF16 else 2 * PAIRS)
    normed_ptr += start * (PAIRS if BF16 else 2 * PAIRS)
    rotation_ptr += start * TURNED
    slot = tl.load(slot_ptr + start + row, mask=live, other=0).to(tl.int64) if SCATTER else start + row
    if NORM:
        rstd = row_rstd(x_ptr, row * PAIRS, live, eps, PAIRS, WORDS, CHUNK, ROWS, BF16)
    for chunk in tl.static_range(0, WORDS // CHUNK):
        word = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        even, odd = load_pairs(x_ptr, row * PAIRS + word, live & (word < PAIRS), BF16)
        if NORM:
            even_weight, odd_weight = load_pairs(weight_ptr, word, word < PAIRS, WEIGHT_BF16)
            even, odd = round_pairs(even_weight * (even * rstd), odd_weight * (odd * rstd), BF16, NATIVE)
        if KEEPS:
            store_pairs(normed_ptr, row * PAIRS + word, live & (word < PAIRS), even, odd, BF16, NATIVE)
        if (TURNED > 0) and (chunk * CHUNK + CHUNK > PAIRS - TURNED):
            even, odd = rotate_pairs(even, odd, rotation_ptr, row, live, word - (PAIRS - TURNED), TURNED)
            even, odd = round_pairs(even, odd, BF16, NATIVE)
        store_rows(
            table_ptr, slot, live, even, odd, chunk * CHUNK,
            PAIRS, ROWS, CHUNK, GROUP, FORM, BF16, STORED, NATIVE,
        )  # fmt: skip


def words(x: torch.Tensor) -> torch.Tensor:
    """What a kernel loads pairs from: bf16 as 32-bit words of two, fp32 as it is."""
    return x.view(torch.int32) if x.dtype is torch.bfloat16 else x


def check_table(name: str, table: torch.Tensor, form: str, channels: int) -> None:
    """Raises ValueError unless `table` [S, row bytes] holds rows of `form`."""
    if form not in FORMS:
        raise ValueError(f"{name}: form must be one of {', '.join(FORMS)}, got {form!r}")
    if channels % GROUPS[form]:
        raise ValueError(f"{name}: {form} rows need a multiple of {GROUPS[form]} channels, got {channels}")
    want = row_bytes(form, channels)
    if table.dtype is not torch.uint8 or table.dim() != 2 or table.shape[1] != want or not table.is_contiguous():
        raise ValueError(
            f"{name}: a table of {form} rows of {channels} channels is contiguous uint8 [slots, {want}], "
            f"got {table.dtype} {list(table.shape)}"
        )


def write_rows(
    x: torch.Tensor,
    table: torch.Tensor,
    form: str,
    *,
    slots: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    rotation: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    stored: bool = False,
    native: bool | None = None,
) -> None:
    """Write `x`, normed and rotated where asked for, as quantised rows into slots of a table.

    Args:
        x: [N, C] bf16 or fp32; each step rounds to this dtype, as the model does.
        table: [S, row bytes] uint8, written in place.
        form: "fp8", "mxfp4" or "nvfp4".
        slots: [N] int32 or int64, different ones; None: row n goes to slot n.
        norm: [C] weight of an RMS norm that comes first; None for none.
        eps: of the norm.
        rotation: [N, P] complex64 factors of the last 2P channels; None for none.
        normed: [N, C] of x.dtype to write the normed rows into, before rotation and rounding; None to keep none.
        stored: the bytes that the cache writes of the rounded value, instead of the quantiser's own.
        native: round by the GPU's conversion instructions instead of integer operations; default where there are any.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    num_rows, channels = x.shape
    check_table("write_rows", table, form, channels)
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"write_rows: x must be bfloat16 or float32, got {x.dtype}")
    for name, value, want in (("slots", slots, [num_rows]), ("norm", norm, [channels])):
        if value is not None and list(value.shape) != want:
            raise ValueError(f"write_rows: {name} must be {want}, got {list(value.shape)}")
    if normed is not None and (normed.shape != x.shape or normed.dtype is not x.dtype or not normed.is_contiguous()):
        raise ValueError(f"write_rows: normed must be contiguous {x.dtype} {list(x.shape)}, got {list(normed.shape)}")
    if rotation is not None and (rotation.dim() != 2 or len(rotation) != num_rows or rotation.shape[1] > channels // 2):
        raise ValueError(
            f"write_rows: rotation must be [{num_rows}, at most {channels // 2}], got {list(rotation.shape)}"
        )
    if slots is None and num_rows > len(table):
        raise ValueError(f"write_rows: {num_rows} rows do not fit a table of {len(table)}")
    if use_reference(x):
        write_rows_ref(x, table, form, slots=slots, norm=norm, eps=eps, rotation=rotation, normed=normed, stored=stored)
        return
    if num_rows == 0:
        return
    pairs = channels // 2
    num_words = max(GROUPS[form] // 2, triton.next_power_of_2(pairs))
    x = x.contiguous()
    turned = 0 if rotation is None else rotation.shape[1]
    block = 16 * max(1, _CHUNK_WORDS // num_words)
    _write_rows_kernel[(triton.cdiv(num_rows, block),)](
        words(x),
        words(x if norm is None else norm.contiguous()),
        x if rotation is None else rotation.contiguous().view(torch.int64),
        x if slots is None else slots,
        table,
        words(x if normed is None else normed),
        num_rows,
        eps,
        PAIRS=pairs,
        WORDS=num_words,
        CHUNK=min(num_words, _CHUNK_WORDS),
        TURNED=turned,
        GROUP=GROUPS[form],
        FORM=FORMS[form],
        NORM=norm is not None,
        KEEPS=normed is not None,
        SCATTER=slots is not None,
        BF16=x.dtype is torch.bfloat16,
        WEIGHT_BF16=norm is not None and norm.dtype is torch.bfloat16,
        STORED=stored,
        NATIVE=not is_interpreted() if native is None else native,
        ROWS=block,
        num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
