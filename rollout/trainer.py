"""Trainer: sealed blocks in, one optimizer step, the next policy version out.

Reads tokens from the blocks, whose digests it checks; the controller only says which rollouts, with which advantage, and
from which version on a token may be trained. A request id asked twice is trained once. Knows no episode and no ledger.

Shapes: R rows of a micro-batch, N loss rows, L layers with experts, K experts a token.
"""

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from burnish.policy.checkpoint.lineage import child_side_files
from burnish.policy.checkpoint.released import load_policy, save_policy
from burnish.policy.model.transformer import Transformer
from burnish.policy.training.forward import Scored, score
from burnish.policy.training.packing import PackedBatch, pack
from burnish.policy.training.step import LossSum, TrainStep
from burnish.rollout.batch import StepResult, TrainItem
from burnish.rollout.layout import forced_experts, lay_out
from burnish.rollout.loss_terms import LossInputs, Normaliser, Reduction, RolloutStatistics
from burnish.rollout.losses import Loss, load_loss
from burnish.rollout.settings import TrainerSettings
from burnish.rollout.weight_sync import WeightManifest, publish

logger = logging.getLogger(__name__)

NO_VERSION_IS_FOREIGN = 2**62


class Trainer:
    """Owns the model that is trained and its optimizer. One process, one rank."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings
        self.model: Transformer = load_policy(settings.policy)
        self.loss: Loss = load_loss(settings.algo.loss, settings.algo.loss_options)
        self._routes: np.ndarray | None = None
        self._rollout_tokens = torch.zeros(0, dtype=torch.int64)
        self._shared_versions = torch.zeros(0, dtype=torch.int64)
        self._step = TrainStep(self.model, settings.train, forward=self._score)
        self._last: tuple[str, StepResult] | None = None

    @property
    def version(self) -> int:
        """Policy version of the weights: optimizer steps taken since the start policy."""
        return self._step.num_steps

    def load(self) -> int:
        """Restores the newest training state where there is one; returns its version."""
        self._step.load(Path(self.settings.checkpoints))
        return self.version

    def forget(self, since: int) -> None:
        """Removes the training states of version `since` and later."""
        self._step.forget(Path(self.settings.checkpoints), since)

    def save(self) -> str:
        """Writes the training state of this version; returns its folder."""
        return str(self._step.save(Path(self.settings.checkpoints)))

    def publish(self) -> WeightManifest:
        """Publishes the weights under this version."""
        return publish(self.model.state_dict(), self.version, Path(self.settings.weights))

    def export(self, folder: str, parents: dict[str, str]) -> str:
        """Writes a policy folder with the weights of this version and their lineage."""
        start = Path(self.settings.policy)
        side = child_side_files(
            start, Path(folder).with_name(".side-files"), stage="rl", parents=parents, steps=self.version
        )
        path = save_policy(self.model, folder, side_files_from=side)
        shutil.rmtree(side)
        return str(path)

    def train(self, request_id: str, items: Sequence[TrainItem]) -> StepResult:
        """One optimizer step on these rollouts.

        Raises:
            BlockError: a block is not what was sealed.
        """
        if self._last is not None and self._last[0] == request_id:
            return self._last[1]
        started = time.monotonic()
        micro_batches = self._lay_out(items)
        normaliser = Normaliser(
            reduction=Reduction(self.settings.algo.reduction),
            rollout_tokens=self._rollout_tokens,
            max_len=self.settings.max_rollout_tokens,
        )
        statistics = self._statistics(micro_batches, len(items)) if self.loss.needs_statistics else None
        version = self.version
        metrics = self._step.step(
            micro_batches,
            lambda scored, packed: self._loss(scored, packed, normaliser, statistics, version),
            denominator=normaliser.denominator,
        )
        rows = sum(len(packed.rows) for packed in micro_batches)
        metrics |= {
            "train/seconds": time.monotonic() - started,
            "train/micro_batches": float(len(micro_batches)),
            "train/slots": float(len(items)),
            "train/rows": float(rows),
            "train/padding_share": 1 - sum(packed.num_tokens for packed in micro_batches) / rows,
        }
        result = StepResult(
            metrics=metrics,
            is_skipped=bool(metrics["train/step_skipped"]),
            version=self.version,
            trained_tokens=tuple(self._rollout_tokens.tolist()),
        )
        self._last = (request_id, result)
        return result

    def mismatch(self, items: Sequence[TrainItem]) -> dict[str, float]:
        """Compares the trainer's log-probabilities with the engine's on tokens of this version; changes nothing.

        Returns:
            `mismatch_kl` (mean of r - log r - 1, r = trainer / engine), `max_abs_lp`, `tokens`; all 0 without such tokens.
        """
        micro_batches = self._lay_out(items)
        differences = []
        with torch.no_grad():
            for packed in micro_batches:
                scored = self._score(self.model, packed)
                is_fresh = self._is_fresh(packed, scored.row, self.version)
                differences.append((scored.logprob - packed.fields["lp_behaviour"][scored.row])[is_fresh].double())
        difference = torch.cat([*differences, torch.zeros(0, dtype=torch.float64)])
        if not len(difference):
            return {"mismatch_kl": 0.0, "max_abs_lp": 0.0, "tokens": 0.0}
        kl = (difference.exp() - difference - 1).mean()
        return {
            "mismatch_kl": float(kl),
            "max_abs_lp": float(difference.abs().max()),
            "tokens": float(len(difference)),
        }

    def _lay_out(self, items: Sequence[TrainItem]) -> list[PackedBatch]:
        """Micro-batches of these rollouts; their routes are what `_score` forces until the next call."""
        step = lay_out(items, Path(self.settings.blocks), is_replayed=self.settings.algo.replay_routes)
        self._routes, self._rollout_tokens = step.routes, step.rollout_tokens
        shared = [NO_VERSION_IS_FOREIGN if item.shared_version is None else item.shared_version for item in items]
        self._shared_versions = torch.tensor(shared, dtype=torch.int64)
        budget = max([self.settings.tokens_per_micro_batch, *(len(sample.ids) for sample in step.samples)])
        return pack(step.samples, budget)

    def _score(self, model: torch.nn.Module, packed: PackedBatch) -> Scored:
        assert isinstance(model, Transformer)
        return score(
            model,
            packed,
            deterministic=self.settings.deterministic,
            forced_experts=None if self._routes is None else forced_experts(packed, self._routes),
            temperature=self.settings.temperature,
            never=sorted({*model.config.placeholder_ids, *self.settings.reserved_ids}),
        )

    def _is_fresh(self, packed: PackedBatch, row: torch.Tensor, version: int) -> torch.Tensor:
        """[N] True where the row's target was sampled by the very weights of `version`."""
        shared = self._shared_versions[packed.rollout[row]]
        return (packed.fields["version"][row] == version) & (shared >= version)

    def _inputs(self, scored: Scored, packed: PackedBatch) -> LossInputs:
        return LossInputs(
            logprobs=scored.logprob,
            behaviour_logprobs=packed.fields["lp_behaviour"][scored.row],
            advantages=packed.fields["advantage"][scored.row],
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
        is_fresh = self._is_fresh(packed, scored.row, version)
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
