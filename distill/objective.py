"""The loss of distillation: sum over the student's own tokens of weight x divergence from their teacher, divided once.

    L = sum_r c_r sum_t D(student | teacher of r at token t) / sum_r c_r T_r

over all rollouts r of the step with T_r trained tokens; c_r is the teacher's weight (token_mean), or that over T_r
(rollout_mean). A micro-batch returns its SUM; the denominator is known before the first one and is the same however the
step is cut, packed, ordered or spread over ranks. Stale tokens need no ratio: the divergence is exact wherever it is taken.

Shapes: N tokens of a micro-batch, B rollouts of the step.
"""

from dataclasses import dataclass

import torch

from burnish.distill.config import DistillAlgoConfig
from burnish.policy.training.divergence import Divergence
from burnish.policy.training.step import LossSum


@dataclass(frozen=True, kw_only=True)
class StepWeights:
    """What each rollout's tokens are multiplied by, and the one denominator."""

    token: torch.Tensor
    """[B] float64, of each token of a rollout."""
    denominator: float

    @classmethod
    def of(cls, teacher_weight: torch.Tensor, rollout_tokens: torch.Tensor, reduction: str) -> "StepWeights":
        """Of the whole step.

        Args:
            teacher_weight: [B] of each rollout's teacher.
            rollout_tokens: [B] trained tokens of each rollout, after every mask; those without one count nowhere.
            reduction: token_mean | rollout_mean.
        """
        counts = rollout_tokens.double()
        token = teacher_weight.double()
        if reduction == "rollout_mean":
            token = token / counts.clamp(min=1)
        return cls(token=token, denominator=float((token * counts).sum()))


def loss_sum(
    found: Divergence, rollout: torch.Tensor, weights: StepWeights, teacher: str, algo: DistillAlgoConfig
) -> LossSum:
    """The micro-batch's share of the step's loss, and its metrics.

    Args:
        found: of its tokens.
        rollout: [N] int64, rollout of each token.
        teacher: whose tokens they are.
    """
    count = float(len(rollout))
    value = found.value.detach().double().sum()
    name = metric_name(algo)
    return LossSum(
        loss=(weights.token[rollout].to(found.value) * found.value).sum(),
        metrics={
            f"distill/{name}": (value, count),
            f"distill/{teacher}/{name}": (value, count),
            "distill/entropy": (found.entropy.double().sum(), count),
            f"distill/{teacher}/entropy": (found.teacher_entropy.double().sum(), count),
        },
    )


def metric_name(algo: DistillAlgoConfig) -> str:
    """What the divergence is called in metrics: only the ends are a KL."""
    return "kl" if algo.beta in (0, 1) else "divergence"
