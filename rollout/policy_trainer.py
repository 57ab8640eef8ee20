"""What is around the optimizer step of a stage that learns from rollouts: states, versions, blocks, and the mismatch gate.

Reads tokens from the blocks, whose digests it checks. A request id asked twice is trained once. What a step minimises is
the subclass's (`trainer.py` for RL, distill/ for distillation). Knows no episode and no ledger.

Shapes: R rows of a micro-batch, N loss rows, L layers with experts, K experts a token.
"""

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish.policy.checkpoint.lineage import child_side_files
from burnish.policy.checkpoint.released import load_policy, save_policy
from burnish.policy.model.transformer import Transformer
from burnish.policy.training.forward import Scored, score
from burnish.policy.training.packing import PackedBatch, Sample, pack
from burnish.policy.training.step import TrainStep
from burnish.rollout.batch import RolloutItem, StepResult
from burnish.rollout.layout import StepSamples, forced_experts, lay_out
from burnish.rollout.settings import PolicyTrainerSettings
from burnish.rollout.weight_sync import WeightManifest, publish

NO_VERSION_IS_FOREIGN = 2**62


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """What a subclass says of the step it took."""

    metrics: dict[str, float]
    """Those of TrainStep among them."""
    micro_batches: Sequence[PackedBatch]
    rollout_tokens: torch.Tensor
    """[B] trained tokens of each rollout."""


class PolicyTrainer(ABC):
    """Owns the model that is trained and its optimizer. One process, one rank."""

    def __init__(self, settings: PolicyTrainerSettings) -> None:
        self.settings = settings
        self.model: Transformer = load_policy(settings.policy)
        self.never = sorted({*self.model.config.placeholder_ids, *settings.reserved_ids})
        """Ids that are never sampled: no part of the policy."""
        self.train_step = TrainStep(self.model, settings.train, forward=self.forward)
        self._routes: np.ndarray | None = None
        self._shared_versions = torch.zeros(0, dtype=torch.int64)
        self._last: tuple[str, StepResult] | None = None

    @abstractmethod
    def take(self, items: Sequence[Any]) -> StepDone:
        """One optimizer step on these rollouts, whatever it minimises."""

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """What the subclass's loss reads of a micro-batch; the targets' log-probabilities unless it says otherwise."""
        return self._score(model, batch)

    @property
    def version(self) -> int:
        """Policy version of the weights: optimizer steps taken since the start policy."""
        return self.train_step.num_steps

    def load(self) -> int:
        """Restores the newest training state where there is one; returns its version."""
        self.train_step.load(Path(self.settings.checkpoints))
        return self.version

    def forget(self, since: int) -> None:
        """Removes the training states of version `since` and later."""
        self.train_step.forget(Path(self.settings.checkpoints), since)

    def save(self) -> str:
        """Writes the training state of this version; returns its folder."""
        return str(self.train_step.save(Path(self.settings.checkpoints)))

    def publish(self) -> WeightManifest:
        """Publishes the weights under this version."""
        return publish(self.model.state_dict(), self.version, Path(self.settings.weights))

    def export(self, folder: str, parents: dict[str, str]) -> str:
        """Writes a policy folder with the weights of this version and their lineage."""
        start, stage = Path(self.settings.policy), self.settings.stage
        side = child_side_files(
            start, Path(folder).with_name(".side-files"), stage=stage, parents=parents, steps=self.version
        )
        path = save_policy(self.model, folder, side_files_from=side)
        shutil.rmtree(side)
        return str(path)

    def train(self, request_id: str, items: Sequence[Any]) -> StepResult:
        """One optimizer step on these rollouts.

        Raises:
            BlockError: a block is not what was sealed.
        """
        if self._last is not None and self._last[0] == request_id:
            return self._last[1]
        started = time.monotonic()
        done = self.take(items)
        rows = sum(len(packed.rows) for packed in done.micro_batches)
        metrics = done.metrics | {
            "train/seconds": time.monotonic() - started,
            "train/micro_batches": float(len(done.micro_batches)),
            "train/slots": float(len(items)),
            "train/rows": float(rows),
            "train/padding_share": 1 - sum(packed.num_tokens for packed in done.micro_batches) / rows,
        }
        result = StepResult(
            metrics=metrics,
            is_skipped=bool(metrics["train/step_skipped"]),
            version=self.version,
            trained_tokens=tuple(done.rollout_tokens.tolist()),
        )
        self._last = (request_id, result)
        return result

    def mismatch(self, items: Sequence[RolloutItem]) -> dict[str, float]:
        """Compares the trainer's log-probabilities with the engine's on tokens of this version; changes nothing.

        Returns:
            `mismatch_kl` (mean of r - log r - 1, r = trainer / engine), `max_abs_lp`, `tokens`; all 0 without such tokens.
        """
        micro_batches = self._lay_out(items)
        differences = []
        with torch.no_grad():
            for packed in micro_batches:
                scored = self._score(self.model, packed)
                is_fresh = self.is_fresh(packed, scored.row, self.version)
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

    def read_items(self, items: Sequence[RolloutItem]) -> StepSamples:
        """Samples of these rollouts; their routes are what `_score` forces until the next call."""
        step = lay_out(items, Path(self.settings.blocks), is_replayed=self.settings.replays_routes)
        self._routes = step.routes
        shared = [NO_VERSION_IS_FOREIGN if item.shared_version is None else item.shared_version for item in items]
        self._shared_versions = torch.tensor(shared, dtype=torch.int64)
        return step

    def budget_of(self, samples: Sequence[Sample]) -> int:
        """Rows of a micro-batch: what was set, or the longest of these samples."""
        return max([self.settings.tokens_per_micro_batch, *(len(sample.ids) for sample in samples)])

    def is_fresh(self, packed: PackedBatch, row: torch.Tensor, version: int) -> torch.Tensor:
        """[N] True where the row's target was sampled by the very weights of `version`."""
        shared = self._shared_versions[packed.rollout[row]]
        return (packed.fields["version"][row] == version) & (shared >= version)

    def _lay_out(self, items: Sequence[RolloutItem]) -> list[PackedBatch]:
        samples = self.read_items(items).samples
        return pack(samples, self.budget_of(samples))

    def _score(self, model: torch.nn.Module, packed: PackedBatch) -> Scored:
        assert isinstance(model, Transformer)
        return score(
            model,
            packed,
            deterministic=self.settings.deterministic,
            forced_experts=None if self._routes is None else forced_experts(packed, self._routes),
            temperature=self.settings.temperature,
            never=self.never,
        )
