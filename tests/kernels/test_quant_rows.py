"""Rows written and read by the kernels: bit for bit what the twins and the cache's store write."""

import pytest
import torch

from burnish.kernels.quant.read import read_rows
from burnish.kernels.quant.reference import (
    GROUPS,
    decode_fp8,
    decode_mxfp4,
    decode_nvfp4,
    fake_fp8,
    fake_mxfp4,
    fake_nvfp4,
    row_bytes,
    write_rows_ref,
)
from burnish.kernels.quant.write import write_rows
from burnish.kernels.testing import POISON_BYTE, assert_bits
from burnish.policy.inference.cache.codec import write_nvfp4

pytestmark = pytest.mark.triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = {
    "fp8": (fake_fp8, decode_fp8),
    "mxfp4": (fake_mxfp4, decode_mxfp4),
    "nvfp4": (fake_nvfp4, decode_nvfp4),
}
DTYPES = [torch.bfloat16, torch.float32]


def adversarial(form: str, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows around every decision: scales from the floor to saturation, ties and their neighbours, signed zeros."""
    generator = torch.Generator().manual_seed(42)
    group = GROUPS[form]
    rows = [torch.randn(24, channels, generator=generator) * torch.logspace(-6, 4, 24).unsqueeze(1)]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 3.0, 224.0, 232.0, 448.0, 13.0, 0.0009765625])
    ties = torch.cat((ties, -ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)))
    picked = ties[torch.randint(len(ties), (32, channels), generator=generator)]
    top = torch.tensor([6.0, 3.0, 224.0, 448.0])[torch.randint(4, (32, 1), generator=generator)]
    picked[:, ::group] = top
    picked = picked.where(picked.abs() <= top, torch.zeros(()))
    scales = torch.tensor([2.0**-130, 2.0**-22, 2.0**-10, 2.0**-9, 0.75, 1.0, 1.125, 448.0, 2.0**40])
    rows.append(picked * scales[torch.randint(len(scales), (32, 1), generator=generator)])
    x = torch.cat(rows).to(dtype)
    x[0], x[1, 0], x[2] = 0.0, -0.0, 1e-30
    x[3, :group] = torch.linspace(1, 2, group) * 2.0**-9
    return x


def written(x: torch.Tensor, form: str, **options) -> torch.Tensor:
    """The table after `write_rows`, on the CPU."""
    table = torch.full((len(x) + 3, row_bytes(form, x.shape[1])), POISON_BYTE, dtype=torch.uint8, device=DEVICE)
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    write_rows(x.to(DEVICE), table, form, **moved)
    return table.cpu()


def wanted(x: torch.Tensor, form: str, **options) -> torch.Tensor:
    table = torch.full((len(x) + 3, row_bytes(form, x.shape[1])), POISON_BYTE, dtype=torch.uint8)
    write_rows_ref(x, table, form, **options)
    return table


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_the_twins_bytes(form, dtype, native):
    x = adversarial(form, 512 if form != "mxfp4" else 128, dtype)
    assert_bits(form, written(x, form, native=native), wanted(x, form))


@pytest.mark.parametrize("channels", [32, 96, 256])
@pytest.mark.parametrize("form", FORMS)
def test_other_widths_and_scattered_slots(form, channels):
    x = adversarial(form, channels, torch.float32)
    slots = torch.randperm(len(x) + 3)[: len(x)]
    got = written(x, form, slots=slots)
    assert_bits(form, got, wanted(x, form, slots=slots))
    untouched = torch.ones(len(got), dtype=torch.bool).index_fill(0, slots, False)
    assert (got[untouched] == POISON_BYTE).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_stored_bytes_are_those_of_a_rounded_value(form, dtype):
    fake, decode = FORMS[form]
    x = adversarial(form, 128, dtype)
    got = written(x, form, stored=True)
    rounded = fake(x)
    if form == "nvfp4":
        assert_bits(form, got[: len(x)], write_nvfp4(rounded.float()))
    else:
        assert_bits(form, got, wanted(rounded, form))
    assert_bits(form, decode(got[: len(x)], 128), rounded.float())
    plain = written(x, form)
    assert form == "nvfp4" or not torch.equal(plain, got), "no group here has two encodings: the test shows nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("form", "channels", "turned"), [("nvfp4", 512, 32), ("fp8", 512, 32), ("mxfp4", 128, 32), ("fp8", 32, 8)]
)
def test_norm_and_rotation_before_rounding(form, channels, turned, dtype):
    x = torch.randn(37, channels).to(dtype) * 3
    x[5] = 0
    position = torch.arange(37) * 977.0
    angle = position.unsqueeze(1) * torch.logspace(0, -3, turned)
    options = {
        "norm": (1 + 0.1 * torch.randn(channels)).to(dtype),
        "eps": 1e-20,
        "rotation": torch.polar(torch.ones_like(angle), angle),
        "slots": torch.randperm(40)[:37],
    }
    assert_bits(form, written(x, form, **options), wanted(x, form, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_rows_read_back(form, dtype):
    decode = FORMS[form][1]
    table = wanted(adversarial(form, 128, torch.float32), form)[:56]
    slots = torch.randint(-1, len(table), (70,))
    got = read_rows(table.to(DEVICE), form, 128, slots=slots.to(DEVICE), dtype=dtype).cpu()
    want = decode(table[slots.clamp_min(0)], 128) * (slots >= 0).unsqueeze(1)
    assert torch.equal(got.float(), want.to(dtype).float())
    assert_bits(form, read_rows(table.to(DEVICE), form, 128, dtype=dtype).cpu(), decode(table, 128).to(dtype))


def test_no_rows_are_no_launch():
    table = torch.full((4, 288), POISON_BYTE, dtype=torch.uint8, device=DEVICE)
    write_rows(torch.empty(0, 512, device=DEVICE), table, "nvfp4")
    assert (table == POISON_BYTE).all()
    assert read_rows(table, "nvfp4", 512, slots=torch.empty(0, dtype=torch.int64, device=DEVICE)).shape == (0, 512)


def test_a_table_of_the_wrong_width_is_refused():
    with pytest.raises(
        ValueError, match=r"nvfp4 rows of 512 channels is contiguous uint8 \[slots, 288\], got .*\[4, 528\]"
    ):
        write_rows(torch.zeros(2, 512), torch.zeros(4, 528, dtype=torch.uint8), "nvfp4")
