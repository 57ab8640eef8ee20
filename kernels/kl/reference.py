"""Divergence between the distributions of two heads over the full vocabulary, in chunks, with its gradient written out.

p = softmax(student logits / t), q = softmax(teacher logits / t). With m = b q + (1 - b) p the divergence is

    D_b = b KL(q | m) + (1 - b) KL(p | m)    for 0 < b < 1   (generalised Jensen-Shannon)
    D_1 = KL(p | q)                          reverse: what on-policy distillation minimises
    D_0 = KL(q | p)                          forward

The ends are definitions of their own: the interior tends to 0 there. Every D_b is a sum over ids of f(p_k, q_k), so its
gradient with respect to the student's logits is (p_k f'_k - p_k sum_j p_j f'_j) / t, f' by p_k; constants in f' cancel.

Two passes over chunks of the vocabulary: log-normalisers, then sums; the backward makes each chunk's logits once more.
Nothing of tokens x vocabulary is ever held beyond one chunk. `dense_divergence_ref` is the definition of correct.
Shapes: N tokens, D and E hidden sizes of student and teacher, V ids, C ids of a chunk.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

CHUNK = 8192
"""Ids of one chunk; N x C fp32 logits of each side are held at a time."""


class Divergence(NamedTuple):
    """Of each token; only `value` carries a gradient."""

    value: torch.Tensor
    """[N] nats."""
    log_normaliser: torch.Tensor
    """[N] log of the sum of the student's exp(logit / t)."""
    entropy: torch.Tensor
    """[N] nats, of the student."""
    teacher_entropy: torch.Tensor
    """[N] nats."""


def dense_divergence_ref(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    excluded: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N] of logits [N, V] with autograd's own gradient; V ids that both sides have, `excluded` as below."""
    if excluded is not None:
        student_logits, teacher_logits = student_logits[:, ~excluded], teacher_logits[:, ~excluded]
    log_p = torch.log_softmax(student_logits / temperature, -1)
    log_q = torch.log_softmax(teacher_logits / temperature, -1)
    if beta == 1:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if beta == 0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    to_teacher, to_student = log_q.exp() * (log_q - log_m), log_p.exp() * (log_p - log_m)
    return (beta * to_teacher + (1 - beta) * to_student).sum(-1)


def divergence_ref(
    student_hidden: torch.Tensor,
    student_head: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_head: torch.Tensor,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    num_ids: int | None = None,
    excluded: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> Divergence:
    """Divergence of each token, with a gradient for the student's hidden states and head.

    Args:
        student_hidden: [N, D].
        student_head: [V, D].
        teacher_hidden: [N, E], of the same tokens in the same order.
        teacher_head: [V, E].
        beta: 1 reverse KL, 0 forward KL, between them generalised Jensen-Shannon.
        temperature: divides both sides' logits.
        num_ids: ids 0 .. num_ids - 1 are the vocabulary; rows beyond are padding and are cut off before the softmax.
            None: both heads have the same rows, and all of them are.
        excluded: [V] bool, ids with probability 0 on both sides, such as those that are never sampled.
        chunk: ids whose logits are held at a time.

    Raises:
        ValueError: different numbers of tokens or ids, hidden states that are not as wide as their head, a value out of
            range.
    """
    _check(student_hidden, student_head, teacher_hidden, teacher_head)
    if not 0 <= beta <= 1:
        raise ValueError(f"divergence: beta must be 0 to 1, got {beta}")
    if not temperature > 0:
        raise ValueError(f"divergence: temperature must be > 0, got {temperature}")
    sizes = len(student_head), len(teacher_head)
    if num_ids is None and sizes[0] != sizes[1]:
        raise ValueError(
            f"divergence: the student's head has {sizes[0]} ids, the teacher's {sizes[1]}; say how many they share"
        )
    num_ids = sizes[0] if num_ids is None else num_ids
    if not 1 <= num_ids <= min(sizes):
        raise ValueError(f"divergence: num_ids must be 1 to {min(sizes)}, got {num_ids}")
    values = _FullVocabulary.apply(
        student_hidden, student_head, teacher_hidden, teacher_head, beta, temperature, num_ids, excluded, chunk
    )
    return Divergence(*values)


def _check(
    student_hidden: torch.Tensor, student_head: torch.Tensor, teacher_hidden: torch.Tensor, teacher_head: torch.Tensor
) -> None:
    if len(student_hidden) != len(teacher_hidden):
        raise ValueError(
            f"divergence: the student has {len(student_hidden)} tokens, the teacher {len(teacher_hidden)}: they must be "
            f"the same ones"
        )
    for side, hidden, head in (("student", student_hidden, student_head), ("teacher", teacher_hidden, teacher_head)):
        if hidden.shape[-1] != head.shape[-1]:
            raise ValueError(
                f"divergence: the {side}'s hidden states are {hidden.shape[-1]} wide, its head is {head.shape[-1]} wide"
            )


class _FullVocabulary(torch.autograd.Function):
    """See `divergence_ref`."""

    @staticmethod
    def forward(
        ctx: Any,
        student_hidden: torch.Tensor,
        student_head: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_head: torch.Tensor,
        beta: float,
        temperature: float,
        num_ids: int,
        excluded: torch.Tensor | None,
        chunk: int,
    ) -> tuple[torch.Tensor, ...]:
        chunks = _Chunks(
            student_hidden, student_head, teacher_hidden, teacher_head, temperature, num_ids, excluded, chunk
        )
        # sums over chunks are kept in fp64, a number a token: their rounding would grow with the number of chunks
        wide = torch.float64
        student, teacher = _LogSoftmax(chunks.student), _LogSoftmax(chunks.teacher)
        for _, p_NC, q_NC in chunks:
            student.add(p_NC)
            teacher.add(q_NC)
        sums = torch.zeros(4, len(student_hidden), dtype=wide, device=student_hidden.device)
        for _, p_NC, q_NC in chunks:
            log_p, log_q = student(p_NC), teacher(q_NC)
            for total, part in zip(sums, (*_terms(log_p, log_q, beta), _entropy(log_p), _entropy(log_q)), strict=True):
                total += part.sum(1, dtype=wide)
        value, pull, entropy, teacher_entropy = sums.to(chunks.dtype)
        ctx.save_for_backward(
            student_hidden, student_head, teacher_hidden, teacher_head, excluded, *student.state, *teacher.state, pull
        )
        ctx.options = (beta, temperature, num_ids, chunk)
        log_normaliser = student.log_normaliser.to(chunks.dtype)
        ctx.mark_non_differentiable(log_normaliser, entropy, teacher_entropy)
        return value, log_normaliser, entropy, teacher_entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_N: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        student_hidden, student_head, teacher_hidden, teacher_head, excluded, *states, pull = ctx.saved_tensors
        beta, temperature, num_ids, chunk = ctx.options
        chunks = _Chunks(
            student_hidden, student_head, teacher_hidden, teacher_head, temperature, num_ids, excluded, chunk
        )
        student, teacher = _LogSoftmax(chunks.student, *states[:2]), _LogSoftmax(chunks.teacher, *states[2:])
        d_hidden = torch.zeros_like(chunks.student) if ctx.needs_input_grad[0] else None
        d_head = torch.zeros_like(student_head) if ctx.needs_input_grad[1] else None
        for ids, p_NC, q_NC in chunks:
            log_p, log_q = student(p_NC), teacher(q_NC)
            _, pull_NC = _terms(log_p, log_q, beta)
            d_logits = (pull_NC - log_p.exp() * pull[:, None]) * (upstream_N[:, None] / temperature)
            if d_hidden is not None:
                d_hidden += d_logits @ student_head[ids].to(d_logits.dtype)
            if d_head is not None:
                d_head[ids] = (d_logits.T @ chunks.student).to(d_head.dtype)
        if d_hidden is not None:
            d_hidden = d_hidden.to(student_hidden.dtype)
        return d_hidden, d_head, *[None] * 7


class _LogSoftmax:
    """Largest logit of each row and the sum of exp(logit - largest), grown chunk by chunk; then log-probabilities.

    The two are kept apart: their sum would be rounded to the size of the logits, and so would every log-probability.
    """

    def __init__(
        self, hidden: torch.Tensor, largest: torch.Tensor | None = None, total: torch.Tensor | None = None
    ) -> None:
        self.largest = hidden.new_full((len(hidden),), -torch.inf) if largest is None else largest
        self.total = hidden.new_zeros(len(hidden), dtype=torch.float64) if total is None else total

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[N] and [N] fp64."""
        return self.largest, self.total

    @property
    def log_normaliser(self) -> torch.Tensor:
        """[N] fp64."""
        return self.largest.double() + self.total.log()

    def add(self, logits_NC: torch.Tensor) -> None:
        """One chunk; where all of it is excluded, nothing."""
        largest = torch.maximum(self.largest, logits_NC.amax(1))
        # before the first id that counts both are -inf
        shift = torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)
        more = (logits_NC - shift[:, None]).exp().sum(1, dtype=torch.float64)
        self.total = self.total * (self.largest - shift).exp().double() + more
        self.largest = largest

    def __call__(self, logits_NC: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [N, C] of a chunk, once every chunk was added."""
        return (logits_NC - self.largest[:, None]) - self.total.log().to(logits_NC.dtype)[:, None]


class _Chunks:
    """Iterates over (ids, student's and teacher's logits / temperature [N, C]), -inf where an id is excluded."""

    def __init__(
        self,
        student_hidden: torch.Tensor,
        student_head: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_head: torch.Tensor,
        temperature: float,
        num_ids: int,
        excluded: torch.Tensor | None,
        chunk: int,
    ) -> None:
        self.dtype = torch.promote_types(torch.promote_types(student_hidden.dtype, student_head.dtype), torch.float32)
        self.student = student_hidden.detach().to(self.dtype)
        self.teacher = teacher_hidden.detach().to(self.dtype)
        self.heads = student_head.detach(), teacher_head.detach()
        self.temperature, self.num_ids, self.excluded, self.chunk = temperature, num_ids, excluded, chunk

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        for start in range(0, self.num_ids, self.chunk):
            ids = slice(start, min(start + self.chunk, self.num_ids))
            logits = [
                (hidden @ head[ids].to(self.dtype).T) / self.temperature
                for hidden, head in zip((self.student, self.teacher), self.heads, strict=True)
            ]
            if self.excluded is not None:
                logits = [part.masked_fill(self.excluded[ids], -torch.inf) for part in logits]
            yield ids, logits[0], logits[1]


def _terms(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """f(p, q) and p f'(p, q) of each id; both 0 where both probabilities are (0 log 0 = 0)."""
    p, q = log_p.exp(), log_q.exp()
    if beta == 1:
        value = _where(p, p * (log_p - log_q))
        return value, value
    if beta == 0:
        return _where(q, q * (log_q - log_p)), -q
    # log m from the larger of the two: where they are close, log p - log m is small and must not come from a subtraction
    ratio = log_q - log_p
    over_p = torch.log1p(beta * torch.expm1(ratio.clamp(max=0)))
    over_q = torch.log1p((1 - beta) * torch.expm1((-ratio).clamp(max=0)))
    p_over_m = torch.where(ratio <= 0, -over_p, -ratio - over_q)
    q_over_m = torch.where(ratio <= 0, ratio - over_p, -over_q)
    to_student = (1 - beta) * _where(p, p * p_over_m)
    return beta * _where(q, q * q_over_m) + to_student, to_student


def _where(probability: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, or 0 where the probability is exactly 0; a NaN probability stays visible."""
    return torch.where(probability == 0, torch.zeros_like(value), value)


def _entropy(log_p: torch.Tensor) -> torch.Tensor:
    return _where(log_p.exp(), -log_p.exp() * log_p)
