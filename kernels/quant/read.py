"""Rows of the caches read back: gather, unpack and scale in one pass. Twin: reference.py of this folder.

Shapes: N rows, C channels, S slots of a table.
"""

import torch
import triton
import triton.language as tl

from burnish.kernels.dispatch import use_reference
from burnish.kernels.quant.bits import FP8, MXFP4, e2m1_value, e4m3_value, e8m0_value, float_bits, spread
from burnish.kernels.quant.reference import GROUPS, read_rows_ref
from burnish.kernels.quant.write import FORMS, check_table


@triton.jit
def _read_rows_kernel(
    table_ptr, slot_ptr, out_ptr, num_rows,
    PAIRS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, GATHER: tl.constexpr,
    BF16: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    PAYLOAD: tl.constexpr = 2 * PAIRS if FORM == FP8 else PAIRS
    GROUPS: tl.constexpr = 2 * PAIRS // GROUP
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    live = row < num_rows
    slot = tl.load(slot_ptr + row, mask=live, other=-1).to(tl.int64) if GATHER else row
    known = live & (slot >= 0)
    base = table_ptr + slot * (PAYLOAD + GROUPS)
    word = tl.arange(0, WORDS)[None, :]
    mask = known & (word < PAIRS)
    group = tl.arange(0, 2 * WORDS // GROUP)[None, :]
    code = tl.load(base + PAYLOAD + group, mask=known & (group < GROUPS), other=0).to(tl.int32)
    if FORM == FP8:
        even = e4m3_value(tl.load(base + 2 * word, mask=mask, other=0).to(tl.int32))
        odd = e4m3_value(tl.load(base + 2 * word + 1, mask=mask, other=0).to(tl.int32))
        scale = e8m0_value(code)
    else:
        byte = tl.load(base + word, mask=mask, other=0).to(tl.int32)
        even, odd = e2m1_value(byte & 15), e2m1_value(byte >> 4)
        scale = e8m0_value(code) if FORM == MXFP4 else e4m3_value(code)
    wide = spread(scale, ROWS, WORDS)
    # a row that is not known reads as zeros: its scale may be 2^-127, its codes are 0
    even, odd = even * wide, odd * wide
    inside = live & (word < PAIRS)
    if BF16:
        # values of all forms are on the bf16 grid
        value = ((float_bits(even) >> 16) & 0xFFFF) | (float_bits(odd) & -65536)
        tl.store(out_ptr + row * PAIRS + word, value, mask=inside)
    else:
        tl.store(out_ptr + (row * PAIRS + word) * 2, even, mask=inside)
        tl.store(out_ptr + (row * PAIRS + word) * 2 + 1, odd, mask=inside)


def read_rows(
    table: torch.Tensor,
    form: str,
    channels: int,
    *,
    slots: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values of rows in slots of a table.

    Args:
        table: [S, row bytes] uint8.
        form: "fp8", "mxfp4" or "nvfp4".
        channels: C.
        slots: [N] int32 or int64, -1 reads zeros; None: all slots in order.
        dtype: torch.float32 or torch.bfloat16, which holds every value of the three forms exactly.
        out: [N, C] of `dtype` to write into.

    Returns:
        [N, C].

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    check_table("read_rows", table, form, channels)
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"read_rows: dtype must be bfloat16 or float32, got {dtype}")
    num_rows = len(table) if slots is None else len(slots)
    if out is None:
        out = torch.empty(num_rows, channels, dtype=dtype, device=table.device)
    elif list(out.shape) != [num_rows, channels] or out.dtype is not dtype or not out.is_contiguous():
        raise ValueError(f"read_rows: out must be contiguous {dtype} [{num_rows}, {channels}], got {list(out.shape)}")
    if use_reference(table):
        return out.copy_(read_rows_ref(table, form, channels, slots=slots))
    if num_rows == 0:
        return out
    num_words = max(GROUPS[form] // 2, triton.next_power_of_2(channels // 2))
    block = max(1, 2048 // num_words)
    _read_rows_kernel[(triton.cdiv(num_rows, block),)](
        table,
        table if slots is None else slots,
        out.view(torch.int32) if dtype is torch.bfloat16 else out,
        num_rows,
        PAIRS=channels // 2,
        WORDS=num_words,
        GROUP=GROUPS[form],
        FORM=FORMS[form],
        GATHER=slots is not None,
        BF16=dtype is torch.bfloat16,
        ROWS=block,
        num_warps=4,
    )
    return out
