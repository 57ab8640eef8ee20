"""Divergence of a policy from another one over the full vocabulary, from final hidden states: the heads run inside.

Shapes: N tokens, D and E hidden sizes of the two policies, V ids.
"""

from dataclasses import dataclass

import torch

from burnish.kernels.kl.reference import Divergence, divergence_ref

__all__ = ["Divergence", "Sides", "divergence"]


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Hidden states of the same tokens in both policies, and the heads that turn them into logits."""

    student_hidden: torch.Tensor
    """[N, D] with its graph, as `forward.hidden_of_targets` gives it."""
    student_head: torch.Tensor
    """[V, D]."""
    teacher_hidden: torch.Tensor
    """[N, E]."""
    teacher_head: torch.Tensor
    """[V, E]."""
    excluded: torch.Tensor
    """[V] bool, of the student's ids, those that are never sampled."""
    num_ids: int
    """Ids that both vocabularies have; rows beyond are padding."""


def divergence(sides: Sides, *, beta: float, temperature: float, chunk: int) -> Divergence:
    """Of each token, with a gradient for the student's hidden states and head.

    Args:
        beta: 1 reverse KL(student | teacher), 0 forward KL, between them generalised Jensen-Shannon.
        temperature: divides both sides' logits.
        chunk: ids whose logits are held at a time.

    Raises:
        ValueError: different tokens or ids, hidden states that are not as wide as their head.
    """
    return divergence_ref(
        sides.student_hidden,
        sides.student_head,
        sides.teacher_hidden,
        sides.teacher_head,
        beta=beta,
        temperature=temperature,
        num_ids=sides.num_ids,
        excluded=sides.excluded,
        chunk=chunk,
    )
