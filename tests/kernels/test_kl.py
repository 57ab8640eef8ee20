"""The chunked divergence against autograd over dense logits, the papers' golden numbers, and what must never be the loss."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from burnish.kernels.kl.reference import dense_divergence_ref, divergence_ref
from burnish.kernels.testing import assert_close

F64 = torch.float64
BETAS = [1.0, 0.0, 0.1, 0.5, 0.9]
# RMS of the error over that of the reference
RATIO = {torch.float64: 1e-13, torch.float32: 1e-6}


def of_probabilities(student, teacher, **options):
    """Divergence and gradient of one position with these probabilities: the head is the identity."""
    logits = torch.tensor(student, dtype=F64).log().unsqueeze(0).requires_grad_()
    size = len(student)
    other = torch.tensor(teacher, dtype=F64).log().unsqueeze(0)
    found = divergence_ref(logits, torch.eye(size, dtype=F64), other, torch.eye(size, dtype=F64), **options)
    (gradient,) = torch.autograd.grad(found.value.sum(), logits)
    return found.value.item(), gradient.squeeze(0)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_golden_numbers_of_reverse_kl(chunk):
    value, gradient = of_probabilities((0.7, 0.2, 0.1), (0.9, 0.05, 0.05), chunk=chunk)
    # a sum over the student's most likely id alone would be -0.1759, with a bucket for the rest 0.1537
    assert value == pytest.approx(0.17065, abs=5e-6)
    assert gradient.tolist() == pytest.approx([-0.2954, 0.2431, 0.0522], abs=5e-5)
    assert gradient.sum().item() == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    ("beta", "right"),
    [(0.0, 0.373386045), (1.0, 0.421967919), (0.1, 0.0334603562), (0.5, 0.0943615069), (0.9, 0.036678233)],
)
def test_beta_means_what_the_paper_says_and_the_ends_are_the_two_kls(beta, right):
    value, _ = of_probabilities((0.3, 0.3, 0.4), (0.7, 0.2, 0.1), beta=beta)
    assert value == pytest.approx(right, rel=1e-8)


def test_the_two_kls_do_not_collapse_where_the_interior_does():
    # a recipe that clamped 1 to 1 - 1e-6 trained on 4.22e-7
    clamped, _ = of_probabilities((0.3, 0.3, 0.4), (0.7, 0.2, 0.1), beta=1 - 1e-6)
    assert clamped == pytest.approx(4.22e-7, rel=1e-3)
    assert of_probabilities((0.3, 0.3, 0.4), (0.7, 0.2, 0.1), beta=1)[0] > 0.42


def test_padding_columns_are_cut_before_the_softmax():
    teacher = torch.tensor([[2, 1, 0, -1, 0.5, 3]], dtype=F64)
    student = torch.tensor([[1, 1, 0, 0]], dtype=F64)
    found = divergence_ref(student, torch.eye(4, dtype=F64), teacher, torch.eye(6, dtype=F64), beta=0.0, num_ids=4)
    # softmax first and cut then: -0.305654971; the student filled up with zero logits: 0.792440888
    assert found.value.item() == pytest.approx(0.178074826, rel=1e-8)
    with pytest.raises(ValueError, match="the student's head has 4 ids, the teacher's 6"):
        divergence_ref(student, torch.eye(4, dtype=F64), teacher, torch.eye(6, dtype=F64))


def test_raising_what_the_teacher_dislikes_raises_the_loss():
    before, gradient = of_probabilities((0.5, 0.3, 0.2), (0.6, 0.38, 0.02))
    after, _ = of_probabilities((0.45, 0.27, 0.28), (0.6, 0.38, 0.02))
    assert gradient[2] > 0
    assert after > before


def problem(dtype, n=33, v=130, d=24, e=17, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, dtype=F64) * scale).to(dtype)

    return draw(n, d), draw(v, d, scale=0.4), draw(n, e), draw(v, e, scale=0.4), draw(n)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    ("chunk", "temperature", "is_excluding"), [(1000, 1.0, False), (37, 0.7, True), (1, 1.9, True)]
)
def test_value_and_both_gradients_equal_the_dense_reference(dtype, beta, chunk, temperature, is_excluding):
    hidden, head, teacher_hidden, teacher_head, upstream = problem(dtype)
    excluded = torch.zeros(len(head), dtype=torch.bool)
    excluded[[0, 5, 6, 7, 129]] = is_excluding
    options = {"beta": beta, "temperature": temperature, "excluded": excluded}

    def run(function):
        leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        value = function(*leaves)
        return value, *torch.autograd.grad((value * upstream).sum(), leaves)

    got = run(lambda h, w: divergence_ref(h, w, teacher_hidden, teacher_head, chunk=chunk, **options).value)
    # the same logits as dense ones; the reference of fp32 is computed in fp64, or its own rounding would be measured
    wide = [x.double() for x in (teacher_hidden, teacher_head)]
    teacher_logits = wide[0] @ wide[1].T
    right = run(lambda h, w: dense_divergence_ref(h.double() @ w.double().T, teacher_logits, **options))
    for name, a, b in zip(("value", "d hidden", "d head"), got, right, strict=True):
        assert a.dtype == dtype
        assert_close(name, a.detach(), b.detach().to(dtype), RATIO[dtype])


def test_gradcheck():
    hidden, head, teacher_hidden, teacher_head, _ = problem(F64, n=3, v=11, d=4, e=5)
    for beta in BETAS:
        assert torch.autograd.gradcheck(
            lambda h, w, beta=beta: divergence_ref(h, w, teacher_hidden, teacher_head, beta=beta, chunk=4).value,
            (hidden.requires_grad_(), head.requires_grad_()),
        )


def test_what_comes_beside_the_value():
    hidden, head, teacher_hidden, teacher_head, _ = problem(F64)
    found = divergence_ref(hidden, head, teacher_hidden, teacher_head, temperature=0.7, chunk=31)
    logits, other = hidden @ head.T / 0.7, teacher_hidden @ teacher_head.T / 0.7
    entropies = [torch.special.entr(x.softmax(-1)).sum(-1) for x in (logits, other)]
    torch.testing.assert_close(found.log_normaliser, logits.logsumexp(-1))
    torch.testing.assert_close(found.entropy, entropies[0])
    torch.testing.assert_close(found.teacher_entropy, entropies[1])
    assert not any(x.requires_grad for x in found[1:])


def test_the_same_distributions_have_no_divergence_and_no_gradient():
    hidden, head, *_ = problem(F64)
    leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    found = divergence_ref(*leaves, hidden, head, chunk=50)
    assert found.value.abs().max() < 1e-14
    assert all(g.abs().max() < 1e-14 for g in torch.autograd.grad(found.value.sum(), leaves))


def test_far_apart_and_peaked_distributions_stay_finite():
    for beta in BETAS:
        hidden = torch.tensor([[200.0, -200.0, 0.0]]).requires_grad_()
        other = torch.tensor([[-200.0, 200.0, 0.0]])
        value = divergence_ref(hidden, torch.eye(3), other, torch.eye(3), beta=beta).value
        (gradient,) = torch.autograd.grad(value.sum(), hidden)
        assert torch.isfinite(value).all(), beta
        assert torch.isfinite(gradient).all(), beta
    # and what is not finite is not hidden
    broken = torch.tensor([[math.nan, 0.0, 0.0]])
    assert divergence_ref(broken, torch.eye(3), other, torch.eye(3)).value.isnan().all()


def test_no_token_is_no_error():
    hidden, head, teacher_hidden, teacher_head, _ = problem(F64)
    leaves = hidden[:0].clone().requires_grad_(), head.clone().requires_grad_()
    found = divergence_ref(*leaves, teacher_hidden[:0], teacher_head)
    gradients = torch.autograd.grad(found.value.sum(), leaves)
    assert found.value.shape == (0,)
    assert gradients[1].abs().max() == 0


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_tokens_times_vocabulary_never_exists():
    n, v, d, chunk = 200, 4000, 8, 100
    hidden, head, teacher_hidden, teacher_head, _ = problem(torch.float32, n=n, v=v, d=d, e=d)
    leaves = hidden.requires_grad_(), head.requires_grad_()
    with LargestTensor() as seen:
        torch.autograd.grad(divergence_ref(*leaves, teacher_hidden, teacher_head, chunk=chunk).value.sum(), leaves)
    assert seen.elements == max(n * chunk, v * d) < n * v / 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"teacher_hidden": (4, 3)}, "the student has 5 tokens, the teacher 4"),
        ({"teacher_head": (7, 2)}, "the teacher's hidden states are 3 wide, its head is 2 wide"),
        ({"student_head": (7, 3)}, "the student's hidden states are 2 wide, its head is 3 wide"),
        ({"num_ids": 8}, "num_ids must be 1 to 7, got 8"),
        ({"beta": 1.5}, "beta must be 0 to 1, got 1.5"),
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    shapes = {"student_hidden": (5, 2), "student_head": (7, 2), "teacher_hidden": (5, 3), "teacher_head": (7, 3)}
    options = {k: v for k, v in change.items() if k not in shapes}
    tensors = {k: torch.zeros(change.get(k, shape)) for k, shape in shapes.items()}
    with pytest.raises(ValueError, match=says):
        divergence_ref(**tensors, **options)
