"""Entries of a Full layer: main rows bit for bit, index rows up to the rounding of one product."""

import pytest
import torch

from burnish.kernels.ced.entries import write_entries
from burnish.kernels.ced.reference import write_entries_ref
from burnish.kernels.quant.reference import decode_mxfp4, row_bytes
from burnish.kernels.testing import POISON_BYTE, assert_bits, error_ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def arguments(rows: int, channels: int, index_channels: int, turned: int, dtype: torch.dtype) -> tuple[tuple, dict]:
    x = (torch.randn(rows, channels) * 3).to(dtype)
    tables = [
        torch.full((rows + 5, row_bytes(form, width)), POISON_BYTE, dtype=torch.uint8)
        for form, width in (("nvfp4", channels), ("mxfp4", index_channels))
    ]
    angle = torch.arange(rows).unsqueeze(1) * torch.logspace(0, -3, turned)
    weights = {
        "norm": (1 + 0.1 * torch.randn(channels)).to(dtype),
        "key": (torch.randn(index_channels, channels) * channels**-0.5).to(dtype),
        "key_norm": (1 + 0.1 * torch.randn(index_channels)).to(dtype),
        "eps": 1e-20,
    }
    slots = torch.randperm(rows + 5)[:rows]
    return (x, *tables, slots, torch.polar(torch.ones_like(angle), angle)), weights


@pytest.mark.triton
@pytest.mark.parametrize(("stored", "fused"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "index_channels", "turned"), [(512, 128, 32), (32, 32, 8)])
def test_both_rows_match_the_twin(channels, index_channels, turned, dtype, stored, fused):
    got, weights = arguments(70, channels, index_channels, turned, dtype)
    want = [value.clone() for value in got]
    write_entries_ref(*want, **weights, stored=stored)
    on_device = [value.to(DEVICE) for value in got]
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in weights.items()}
    write_entries(*on_device, **moved, stored=stored, fused=fused)
    main, index = on_device[1].cpu(), on_device[2].cpu()
    assert_bits("main", main, want[1])
    keys = [decode_mxfp4(rows[got[3]], index_channels) for rows in (index, want[2])]
    # another order of the sum moves a key by one rounding of its dtype, which now and then crosses a bin
    differ = (keys[0] != keys[1]).float().mean().item()
    assert differ < (0.02 if dtype is torch.bfloat16 else 1e-3), f"{differ:.4f} of the index values differ"
    assert error_ratio(*keys) < 0.05
    untouched = torch.ones(len(index), dtype=torch.bool).index_fill(0, got[3], False)
    assert (index[untouched] == POISON_BYTE).all()


def test_weights_of_another_dtype_are_refused():
    got, weights = arguments(2, 32, 32, 8, torch.float32)
    weights["key"] = weights["key"].bfloat16()
    with pytest.raises(ValueError, match=r"key must be torch.float32 \[32, 32\], got torch.bfloat16"):
        write_entries(*got, **weights)
