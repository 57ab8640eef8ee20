"""The linear log-probability against its twin: values and gradients, odd sizes, temperature, banned ids, slices."""

import pytest
import torch

from burnish.kernels.loss import linear_logprob as module
from burnish.kernels.loss.linear_logprob import linear_logprob
from burnish.kernels.loss.reference import linear_logprob_ref
from burnish.kernels.testing import assert_close

pytestmark = pytest.mark.triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(tokens: int, size: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(42)
    hidden, weight = torch.randn(tokens, size), torch.randn(vocabulary, size) / size**0.5 * 3
    target = torch.randint(vocabulary, (tokens,))
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), target.to(DEVICE)


def run(fn, hidden, weight, target, **options) -> tuple[torch.Tensor, ...]:
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    outputs = fn(*leaves, target, **options)
    torch.manual_seed(7)
    grads = [torch.randn(len(target)).to(DEVICE) for _ in outputs]
    return *outputs, *torch.autograd.grad(outputs, leaves, grads)


def compare(inputs: tuple[torch.Tensor, ...], ratio: float, **options) -> None:
    got, want = run(linear_logprob, *inputs, **options), run(linear_logprob_ref, *inputs, **options)
    for name, a, b in zip(("logprob", "entropy", "dhidden", "dweight"), got, want, strict=True):
        assert a.dtype == b.dtype
        assert_close(name, a, b, ratio)


@pytest.mark.parametrize(("tokens", "size", "vocabulary"), [(1, 16, 70), (40, 48, 200), (33, 20, 129)])
def test_values_and_gradients_match_the_twin(tokens, size, vocabulary):
    compare(make(tokens, size, vocabulary), 1e-5)


def test_temperature_and_banned_ids():
    inputs = make(20, 32, 150)
    banned = torch.zeros(150, dtype=torch.bool, device=DEVICE)
    banned[:70] = True  # the whole first tile of the vocabulary
    inputs[2].clamp_(min=70)
    compare(inputs, 1e-5, temperature=0.7, banned=banned)


def test_the_backward_adds_up_slices_of_the_vocabulary(monkeypatch):
    monkeypatch.setattr(module, "SLICE", 64)
    compare(make(17, 24, 150), 1e-5)


def test_a_banned_target_has_no_probability():
    hidden, weight, target = make(3, 16, 70)
    banned = torch.zeros(70, dtype=torch.bool, device=DEVICE)
    banned[target[1]] = True
    logprob, entropy = linear_logprob(hidden, weight, target, banned=banned)
    assert torch.isneginf(logprob).tolist() == (target == target[1]).tolist()
    assert torch.isfinite(entropy).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no bf16 arithmetic")
def test_bf16_matches_the_twin():
    compare(make(300, 512, 5000, torch.bfloat16), 1e-2, temperature=0.8)


def test_wrong_arguments_are_named():
    hidden, weight, target = make(3, 16, 70)
    with pytest.raises(ValueError, match=r"temperature must be > 0, got 0"):
        linear_logprob(hidden, weight, target, temperature=0)
    with pytest.raises(ValueError, match=r"target must be \(3,\), got \(2,\)"):
        linear_logprob(hidden, weight, target[:2])
