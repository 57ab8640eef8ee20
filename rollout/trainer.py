"""Trainer: sealed blocks in, one optimizer step of RL, the next policy version out.

The controller only says which rollouts, with which advantage, and from which version on a token may be trained.

Shapes: N loss rows of a micro-batch, B rollouts of the step.
"""

from collections.abc import Sequence

import torch

from burnish.policy.training.forward import Scored
from burnish.policy.training.packing import PackedBatch, pack
from burnish.policy.training.step import LossSum
from burnish.rollout.batch import TrainItem
from burnish.rollout.loss_terms import LossInputs, Normaliser, Reduction, RolloutStatistics
from burnish.rollout.losses import Loss, load_loss
from burnish.rollout.policy_trainer import PolicyTrainer, StepDone
from burnish.rollout.settings import TrainerSettings


class Trainer(PolicyTrainer):
    """Maximises advantages; see PolicyTrainer for what is around a step."""

    settings: TrainerSettings

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__(settings)
        self.loss: Loss = load_loss(settings.algo.loss, settings.algo.loss_options)
        self._advantages = torch.zeros(0)
        """[B] of the step that is being taken."""

    def take(self, items: Sequence[TrainItem]) -> StepDone:
        """One optimizer step on these rollouts.

        Raises:
            BlockError: a block is not what was sealed.
        """
        step = self.read_items(items)
        micro_batches = pack(step.samples, self.budget_of(step.samples))
        self._advantages = torch.tensor([item.advantage for item in items], dtype=torch.float32)
        normaliser = Normaliser(
            reduction=Reduction(self.settings.algo.reduction),
            rollout_tokens=step.rollout_tokens,
            max_len=self.settings.max_rollout_tokens,
        )
        statistics = self._statistics(micro_batches, len(items)) if self.loss.needs_statistics else None
        version = self.version
        metrics = self.train_step.step(
            micro_batches,
            lambda scored, packed: self._loss(scored, packed, normaliser, statistics, version),
            denominator=normaliser.denominator,
        )
        return StepDone(metrics=metrics, micro_batches=micro_batches, rollout_tokens=step.rollout_tokens)

    def _inputs(self, scored: Scored, packed: PackedBatch) -> LossInputs:
        return LossInputs(
            logprobs=scored.logprob,
            behaviour_logprobs=packed.fields["lp_behaviour"][scored.row],
            advantages=self._advantages[packed.rollout[scored.row]],
            mask=torch.ones(len(scored.row), dtype=torch.bool),
            rollout=packed.rollout[scored.row],
            # one step a batch: the proximal policy is the policy at the start of this very step
            proximal_logprobs=scored.logprob.detach() if self.settings.algo.decoupled else None,
            entropy=scored.entropy,
        )

    def _loss(
        self,
        scored: Scored,
        packed: PackedBatch,
        normaliser: Normaliser,
        statistics: RolloutStatistics | None,
        version: int,
    ) -> LossSum:
        result = self.loss(self._inputs(scored, packed), normaliser, statistics)
        drift = (scored.logprob.detach() - packed.fields["lp_behaviour"][scored.row]).double()
        result.metrics["train/behaviour_kl"] = ((drift.exp() - drift - 1).sum(), float(len(drift)))
        # at age 0 engine and trainer hold the same weights: what differs is numerics, and nothing else
        is_fresh = self.is_fresh(packed, scored.row, version)
        difference = drift[is_fresh]
        result.metrics["train/mismatch_kl_fresh"] = (
            (difference.exp() - difference - 1).sum(),
            float(len(difference)),
        )
        return result

    def _statistics(self, micro_batches: Sequence[PackedBatch], num_rollouts: int) -> RolloutStatistics:
        with torch.no_grad():
            parts = [
                RolloutStatistics.of(self._inputs(self._score(self.model, packed), packed), num_rollouts)
                for packed in micro_batches
            ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
