"""RMS norm: values and the written-out gradient against the plain formula."""

import pytest
import torch

from burnish.kernels.norm.reference import rms_norm_ref


@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 100)])
def test_values_and_gradients_match_the_plain_formula(shape):
    x, weight, grad = torch.randn(shape) * 3, torch.randn(shape[-1]), torch.randn(shape)

    def run(norm):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = norm(*leaves)
        return y, *torch.autograd.grad(y, leaves, grad)

    def plain(x, weight):
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    for got, expected in zip(run(lambda x, w: rms_norm_ref(x, w, 1e-6)), run(plain), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_half_precision_is_rounded_once_at_the_end():
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    expected = rms_norm_ref(x.float(), weight.float(), 1e-6).bfloat16()
    assert torch.equal(rms_norm_ref(x, weight, 1e-6), expected)
