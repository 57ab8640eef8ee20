"""The rotary kernel against its twin: values, gradient, in place, back and forth."""

import pytest
import torch

from burnish.kernels.rope.reference import rotate_ref
from burnish.kernels.rope.rotate import rotate, rotate_
from burnish.kernels.testing import assert_close

pytestmark = pytest.mark.triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def angles(num_rows: int, pairs: int) -> torch.Tensor:
    angle = torch.rand(num_rows, pairs, device=DEVICE) * 6.3
    return torch.polar(torch.ones_like(angle), angle)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("shape", "pairs"), [((3, 48), 8), ((5, 4, 32), 16), ((70, 2, 20), 4)])
def test_rotate_matches_its_twin_in_value_and_gradient(shape, pairs, inverse):
    torch.manual_seed(42)
    x, dy, rotation = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE), angles(shape[0], pairs)

    def run(fn):
        leaf = x.clone().requires_grad_()
        y = fn(leaf, rotation, inverse)
        return y, *torch.autograd.grad(y, leaf, dy)

    for name, got, want in zip(("y", "dx"), run(rotate), run(rotate_ref), strict=True):
        assert_close(name, got, want, 1e-6)
    in_place = rotate_(x.clone(), rotation, inverse)
    assert torch.equal(in_place, rotate(x, rotation, inverse))


def test_turning_back_restores_and_the_head_is_not_touched():
    torch.manual_seed(42)
    x, rotation = torch.randn(6, 3, 40, device=DEVICE), angles(6, 8)
    turned = rotate(x, rotation)
    assert torch.equal(turned[..., :24], x[..., :24])
    assert_close("back", rotate(turned, rotation, inverse=True), x, 1e-6)


def test_wrong_rotations_are_named():
    with pytest.raises(ValueError, match=r"rotate: 8 pairs do not fit into 12 channels"):
        rotate(torch.ones(2, 12, device=DEVICE), angles(2, 8))
    with pytest.raises(ValueError, match=r"rotation must be complex64 \[2, P\]"):
        rotate(torch.ones(2, 12, device=DEVICE), angles(3, 4))
