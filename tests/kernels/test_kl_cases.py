"""Public cases of distillation (D04, D07) that other tests leave open: the wrong ways by their numbers, and certainty as a value."""

import math

import pytest
import torch

from burnish.kernels.kl.reference import divergence_ref

F64 = torch.float64


def forward_kl(student: list[float], teacher: list[float], num_ids: int | None = None) -> float:
    """KL(teacher | student) of one position with these logits: heads are identities."""
    p, q = torch.tensor([student], dtype=F64), torch.tensor([teacher], dtype=F64)
    heads = torch.eye(len(student), dtype=F64), torch.eye(len(teacher), dtype=F64)
    return divergence_ref(p, heads[0], q, heads[1], beta=0.0, num_ids=num_ids).value.item()


def test_neither_wrong_way_of_mending_two_widths_is_ours():
    teacher, student = [2.0, 1.0, 0.0, -1.0, 0.5, 3.0], [1.0, 1.0, 0.0, 0.0]
    right = forward_kl(student, teacher, num_ids=4)
    assert right == pytest.approx(0.178074826, rel=1e-8)
    whole = torch.tensor(teacher, dtype=F64).softmax(-1)[:4]
    cut = (whole * (whole.log() - torch.tensor(student, dtype=F64).log_softmax(-1))).sum()
    assert whole.sum().item() == pytest.approx(0.345540457, rel=1e-8)
    assert cut.item() == pytest.approx(-0.305654971, rel=1e-8), "softmax first and cut then: no divergence is negative"
    filled = forward_kl([*student, 0.0, 0.0], teacher)
    assert filled == pytest.approx(0.792440888, rel=1e-8), "padding that was filled up takes part"


def test_a_teacher_that_is_certain_is_a_value_and_not_a_gap():
    """A log-probability of exactly 0.0 was read as `missing` elsewhere: the token then taught nothing."""
    certain = [800.0, 0.0, 0.0]
    assert torch.tensor(certain, dtype=F64).log_softmax(-1)[0].item() == 0.0
    student = torch.tensor([[0.0, 1.0, 0.0]], dtype=F64).requires_grad_()
    teacher = torch.tensor([certain], dtype=F64)
    value = divergence_ref(student, torch.eye(3, dtype=F64), teacher, torch.eye(3, dtype=F64), beta=0.0).value
    assert value.item() == pytest.approx(math.log(2 + math.e), rel=1e-12), "-log of the student's own probability"
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert gradient[0, 0].item() == pytest.approx(1 / (2 + math.e) - 1, rel=1e-12)
    reverse = divergence_ref(student, torch.eye(3, dtype=F64), teacher, torch.eye(3, dtype=F64), beta=1.0).value
    p = student.detach().softmax(-1)
    entropy = torch.special.entr(p).sum().item()
    assert reverse.item() == pytest.approx(800 * (1 - p[0, 0].item()) - entropy, rel=1e-12)
