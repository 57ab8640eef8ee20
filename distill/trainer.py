"""Distiller: the student's sealed blocks in, one optimizer step towards the teachers, the next policy version out.

A step: teachers score the contexts that the cache lacks, one model at a time; then micro-batches go teacher by teacher, each
with the student's graph, the cached states and that teacher's head. Gradients add up, so the order inside a step changes
nothing; the denominator is one. Contexts are laid out plainly (one sample each): what the objective is asked at a visited
state does not depend on which policy version visited it.

Shapes: N target tokens of a micro-batch, B rollouts of the step, V ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burnish.distill.batch import DistillItem
from burnish.distill.cache import StateCache
from burnish.distill.health import check_says
from burnish.distill.objective import StepWeights, loss_sum
from burnish.distill.settings import DistillerSettings
from burnish.distill.teachers import Teachers
from burnish.policy.model.transformer import Transformer
from burnish.policy.training.divergence import Divergence, Sides, divergence
from burnish.policy.training.forward import TargetRows, hidden_of_targets
from burnish.policy.training.packing import PackedBatch, Sample, batch_of, bins
from burnish.policy.training.step import LossSum
from burnish.rollout.policy_trainer import PolicyTrainer, StepDone


@dataclass(frozen=True, kw_only=True)
class TeacherBatch:
    """A micro-batch of one teacher's contexts."""

    teacher: str
    samples: tuple[Sample, ...]
    packed: PackedBatch


class Distiller(PolicyTrainer):
    """Trains the student; see PolicyTrainer for what is around a step."""

    settings: DistillerSettings

    def __init__(self, settings: DistillerSettings) -> None:
        super().__init__(settings)
        cache = StateCache(Path(settings.cache), settings.cache_bytes)
        self.teachers = Teachers(
            settings.teachers,
            cache,
            tokens_per_micro_batch=settings.tokens_per_micro_batch,
            deterministic=settings.deterministic,
        )
        self.teachers.open()
        self._healthy: set[str] = set()
        """Teachers whose words were looked at in this process."""
        self._excluded = torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
        self._excluded[self.never] = True

    def take(self, items: Sequence[DistillItem]) -> StepDone:
        """One optimizer step on these rollouts.

        Raises:
            TeacherError: a teacher is not fit to be learnt from, or has changed.
            UserError: the cache cannot hold one step.
            BlockError: a block is not what was sealed.
        """
        self.teachers.take_counts()
        step = self.read_items(items)
        samples: dict[str, list[Sample]] = {}
        for sample in step.samples:
            samples.setdefault(items[sample.rollout].teacher, []).append(sample)
        samples = dict(sorted(samples.items()))
        self.teachers.prepare(samples)
        batches = [batch for name, mine in samples.items() for batch in self._batches(name, mine)]
        self._check_health(batches)
        weights = StepWeights.of(
            torch.tensor([self.settings.teachers[item.teacher].weight for item in items], dtype=torch.float64),
            step.rollout_tokens,
            self.settings.algo.reduction,
        )
        version = self.version
        metrics = self.train_step.step(
            batches, lambda rows, batch: self._loss(rows, batch, weights, version), denominator=weights.denominator
        )
        self.teachers.give_up_head()
        metrics |= self._ages([batch.packed for batch in batches], version) | self._costs()
        return StepDone(
            metrics=metrics, micro_batches=[batch.packed for batch in batches], rollout_tokens=step.rollout_tokens
        )

    def forward(self, model: torch.nn.Module, batch: Any) -> TargetRows:
        """The student's hidden states of a micro-batch's targets."""
        assert isinstance(model, Transformer)
        assert isinstance(batch, TeacherBatch)
        return hidden_of_targets(model, batch.packed, deterministic=self.settings.deterministic)

    def _batches(self, teacher: str, samples: Sequence[Sample]) -> list[TeacherBatch]:
        found = []
        for members in bins(samples, self.budget_of(samples)):
            chosen = tuple(samples[i] for i in members)
            found.append(TeacherBatch(teacher=teacher, samples=chosen, packed=batch_of(chosen)))
        return found

    def _sides(self, rows: TargetRows, batch: TeacherBatch) -> Sides:
        return Sides(
            student_hidden=rows.hidden,
            student_head=self.model.head.weight,
            teacher_hidden=self.teachers.states(batch.teacher, batch.samples),
            teacher_head=self.teachers.head(batch.teacher),
            excluded=self._excluded,
            num_ids=self.settings.num_ids,
        )

    def _loss(self, rows: TargetRows, batch: TeacherBatch, weights: StepWeights, version: int) -> LossSum:
        algo, packed = self.settings.algo, batch.packed
        found = divergence(
            self._sides(rows, batch), beta=algo.beta, temperature=algo.temperature, chunk=algo.vocabulary_chunk
        )
        result = loss_sum(found, packed.rollout[rows.row], weights, batch.teacher, algo)
        if algo.temperature == self.settings.temperature:
            result.metrics["train/mismatch_kl_fresh"] = self._mismatch(rows, packed, found, version)
        return result

    def _mismatch(
        self, rows: TargetRows, packed: PackedBatch, found: Divergence, version: int
    ) -> tuple[torch.Tensor, float]:
        """Trainer against engine on tokens of these very weights that were sampled from the full vocabulary."""
        target = packed.target[rows.row]
        with torch.no_grad():
            logit = (rows.hidden.float() * self.model.head.weight[target]).sum(-1) / self.settings.temperature
            difference = logit - found.log_normaliser - packed.fields["lp_behaviour"][rows.row]
        is_measured = self.is_fresh(packed, rows.row, version)
        if packed.kept_offsets is not None:
            is_measured = is_measured & (packed.kept_offsets.diff()[rows.row] == 0)
        difference = difference[is_measured].double()
        return (difference.exp() - difference - 1).sum(), float(len(difference))

    def _check_health(self, batches: Sequence[TeacherBatch]) -> None:
        """What teachers that were not met before say of the student's trajectories; raises TeacherError."""
        for name in sorted({batch.teacher for batch in batches} - self._healthy):
            logprobs, entropies = [], []
            for batch in batches:
                if batch.teacher == name:
                    states, head = self.teachers.states(name, batch.samples), self.teachers.head(name)
                    found = divergence(
                        Sides(
                            student_hidden=states,
                            student_head=head,
                            teacher_hidden=states,
                            teacher_head=head,
                            excluded=self._excluded,
                            num_ids=self.settings.num_ids,
                        ),
                        beta=1.0,
                        temperature=1.0,
                        chunk=self.settings.algo.vocabulary_chunk,
                    )
                    target = batch.packed.target[torch.nonzero(batch.packed.loss_mask).squeeze(1)]
                    logprobs.append((states.float() * head[target]).sum(-1) - found.log_normaliser)
                    entropies.append(found.entropy)
            num_ids = self.settings.num_ids - int(self._excluded[: self.settings.num_ids].sum())
            check_says(name, torch.cat(logprobs), torch.cat(entropies), num_ids, self.settings.health)
            self._healthy.add(name)

    def _costs(self) -> dict[str, float]:
        """What the teachers of this step cost."""
        counts, cache = self.teachers.take_counts(), self.teachers.cache
        return {
            "distill/model_loads": float(counts.model_loads),
            "distill/head_loads": float(counts.head_loads),
            "distill/load_s": counts.load_s,
            "distill/score_s": counts.score_s,
            "distill/cached_share": counts.cached / max(counts.contexts, 1),
            "distill/cache_bytes": float(cache.num_bytes),
            "distill/cache_evicted": float(cache.num_evicted),
            "distill/cache_damaged": float(cache.num_damaged),
        }

    def _ages(self, packed: Sequence[PackedBatch], version: int) -> dict[str, float]:
        """Age of the trained tokens in policy versions."""
        ages = torch.cat([version - batch.fields["version"][batch.loss_mask] for batch in packed])
        return {"distill/age": float(ages.double().mean()), "distill/age_max": float(ages.max())}
