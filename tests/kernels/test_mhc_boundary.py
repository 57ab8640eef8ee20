"""The single-pass boundary against its twin: values and every gradient, odd sizes, each of its three forms."""

import pytest
import torch

from burnish.kernels.mhc.boundary import Tiles, boundary_inference
from burnish.kernels.mhc.reference import boundary_ref
from burnish.kernels.mhc.single_pass import boundary
from burnish.kernels.testing import assert_close

pytestmark = pytest.mark.triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the GPU's exponential, division and reciprocal root are approximate, and 39 normalisations add up
ROUNDING = 10 if DEVICE == "cuda" else 1
OPTIONS = {"norm_eps": 1e-20, "eps": 1e-6, "iters": 20}
NAMES = ("y", "streams", "pre", "post", "comb", "fn", "base", "scale")


def make(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(42)
    values = {
        "y": torch.randn(num_rows, size).to(dtype),
        "streams": torch.randn(num_rows, 4, size).to(dtype),
        "pre": torch.rand(num_rows, 4),
        "post": 2 * torch.rand(num_rows, 4),
        "comb": torch.rand(num_rows, 4, 4) / 2,
        "fn": torch.randn(24, 4 * size) * 0.5 / size**0.5,
        "base": torch.randn(24),
        "scale": torch.tensor([1.0, 0.7, 1.3]),
    }
    return {name: value.to(DEVICE) for name, value in values.items()}


def run(fn, values: dict[str, torch.Tensor | None], **options) -> tuple[torch.Tensor, ...]:
    """Outputs, then gradients of every input that is there."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items() if value is not None}
    outputs = [out for out in fn(*(leaves.get(name) for name in NAMES), **OPTIONS, **options) if out is not None]
    torch.manual_seed(7)
    grads = [torch.randn(out.shape).to(out) for out in outputs]
    return *outputs, *torch.autograd.grad(outputs, list(leaves.values()), grads)


def compare(values: dict[str, torch.Tensor | None], ratio: float) -> None:
    got, want = run(boundary, values, deterministic=False), run(boundary_ref, values, tiled=False)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        assert_close(f"output or gradient {index}", a, b, ratio)


@pytest.mark.parametrize(("num_rows", "size"), [(1, 32), (21, 96), (16, 200)])
def test_boundary_matches_its_twin_in_values_and_gradients(num_rows, size):
    compare(make(num_rows, size), 2e-5 * ROUNDING)


def test_first_site_collapses_and_computes_coefficients_only():
    values = make(5, 64)
    compare(values | {"y": None, "post": None, "comb": None}, 2e-5 * ROUNDING)


def test_after_the_last_site_nothing_is_predicted():
    values = make(5, 64)
    compare(values | {"fn": None, "base": None, "scale": None}, 2e-5 * ROUNDING)


def test_a_zero_stream_stays_finite():
    values = make(3, 32)
    values["streams"][1], values["y"][1] = 0, 0
    got, want = boundary_inference(*values.values(), **OPTIONS), boundary_ref(*values.values(), **OPTIONS, tiled=False)
    for a, b in zip(got, want, strict=True):
        assert_close("zero stream", a, b, 1e-5 * ROUNDING)


def test_splits_of_the_channels_and_row_tiles_change_nothing_but_rounding():
    values = make(37, 160)
    whole = boundary_inference(*values.values(), **OPTIONS, tiles=Tiles(block_r=64, block_d=64, splits=1, num_warps=4))
    cut = boundary_inference(*values.values(), **OPTIONS, tiles=Tiles(block_r=16, block_d=32, splits=4, num_warps=4))
    for a, b in zip(whole, cut, strict=True):
        assert_close("splits", a, b, 1e-6 * ROUNDING)


def test_deterministic_bits_do_not_depend_on_the_batch():
    values = make(40, 96)
    whole = boundary_inference(*values.values(), **OPTIONS, deterministic=True)
    per_row = {"y", "streams", "pre", "post", "comb"}
    part = {name: value[5:9].contiguous() if name in per_row else value for name, value in values.items()}
    for a, b in zip(whole, boundary_inference(*part.values(), **OPTIONS, deterministic=True), strict=True):
        assert torch.equal(a[5:9], b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no bf16 arithmetic")
@pytest.mark.parametrize(("num_rows", "size"), [(7, 512), (129, 5120), (2500, 1024)])
def test_bf16_streams_match_the_twin(num_rows, size):
    compare(make(num_rows, size, torch.bfloat16), 1e-2)


def test_wrong_shapes_are_named():
    values = make(3, 32)
    with pytest.raises(ValueError, match=r"mhc: fn must be \(24, 128\), got \(24, 96\)"):
        boundary(*(values | {"fn": values["fn"][:, :96]}).values(), **OPTIONS)
