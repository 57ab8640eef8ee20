"""The RMSNorm kernel against its twin: values bit by bit where the twin is exact, gradients within rounding."""

import pytest
import torch

from burnish.kernels.norm.reference import rms_norm_ref
from burnish.kernels.norm.rms_norm import rms_norm
from burnish.kernels.testing import assert_bits, assert_close

pytestmark = pytest.mark.triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 100), (2, 1280), (70, 33)], ids=str)
def test_rms_norm_matches_its_twin(shape, dtype):
    torch.manual_seed(42)
    x, dy = torch.randn(2, *shape, device=DEVICE).to(dtype)
    weight = torch.randn(shape[-1], device=DEVICE).to(dtype)

    def run(fn):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = fn(*leaves, 1e-20)
        return y, *torch.autograd.grad(y, leaves, dy)

    got, want = run(rms_norm), run(rms_norm_ref)
    bound = 1e-6 if dtype == torch.float32 else 5e-3
    for name, a, b in zip(("y", "dx", "dweight"), got, want, strict=True):
        assert a.dtype == b.dtype
        assert_close(name, a, b, bound)
    # the CPU's square root and division are exact, and so are the kernel's
    assert_bits("y", got[0], rms_norm_ref(x.cpu(), weight.cpu(), 1e-20))


def test_zero_rows_and_no_rows():
    weight = torch.ones(64, device=DEVICE)
    assert torch.equal(rms_norm(torch.zeros(2, 64, device=DEVICE), weight, 1e-20), torch.zeros(2, 64, device=DEVICE))
    assert rms_norm(torch.zeros(0, 64, device=DEVICE), weight, 1e-20).shape == (0, 64)


def test_rms_norm_rejects_a_wrong_weight():
    with pytest.raises(ValueError, match=r"weight must be \(64,\) to match x, got \(32,\)"):
        rms_norm(torch.ones(2, 64, device=DEVICE), torch.ones(32, device=DEVICE), 1e-6)
