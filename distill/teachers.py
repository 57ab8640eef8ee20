"""The specialists in the trainer's process: their hidden states through the cache, one model or one head in memory.

A teacher's model is loaded only for contexts that the cache lacks, all of a step at once, and given up again; then its head
alone is loaded, once a step. So memory does not depend on the number of teachers. Every load is held against the bytes of
the first one. Contexts are scored as they stand (plain layout, no dropout, no temperature): sampling settings change nothing.

Shapes: N target rows of a context, E hidden size, V ids.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from burnish.distill.cache import StateCache, context_key, entry_bytes
from burnish.distill.specialist import Teacher, TeacherError
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.checkpoint.released import load_policy, read_tensors
from burnish.policy.model.transformer import Transformer
from burnish.policy.training.forward import hidden_of_targets
from burnish.policy.training.packing import Sample, batch_of, bins
from burnish.rollout.weight_sync import checksums

logger = logging.getLogger(__name__)

HEAD = "head.weight"


@dataclass(kw_only=True)
class Counts:
    """What was done since the counts were taken last."""

    model_loads: int = 0
    head_loads: int = 0
    contexts: int = 0
    """Contexts that were asked for."""
    cached: int = 0
    """Those of them that were in the cache."""
    load_s: float = 0.0
    score_s: float = 0.0


class Teachers:
    """All specialists of a run.

    Args:
        teachers: by name.
        cache: of their hidden states.
        tokens_per_micro_batch: rows scored at a time; a longer context is scored alone.
        deterministic: states of a row do not depend on what is scored beside it.
    """

    def __init__(
        self, teachers: Mapping[str, Teacher], cache: StateCache, *, tokens_per_micro_batch: int, deterministic: bool
    ) -> None:
        self.teachers, self.cache = dict(teachers), cache
        self.counts = Counts()
        self._budget, self._deterministic = tokens_per_micro_batch, deterministic
        self._sums: dict[str, dict[str, str]] = {}
        """Checksums of each teacher's tensors at its first load."""
        self._resident: tuple[str, torch.Tensor] | None = None

    def open(self) -> None:
        """Loads each teacher once: whole, finite, and the bytes that the run was started with.

        Raises:
            TeacherError: naming the teacher that is not.
        """
        for name in self.teachers:
            self._model(name)

    def prepare(self, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Makes sure that the states of a step are in the cache, and holds them there.

        Args:
            samples: of each teacher.

        Raises:
            UserError: the cache cannot hold them.
            TeacherError: a teacher has changed, or its states are not finite.
        """
        self.cache.hold(
            (self._key(name, sample), entry_bytes(len(target_rows(sample)), self.teachers[name].width))
            for name, mine in samples.items()
            for sample in mine
        )
        for name, mine in samples.items():
            wanted = {self._key(name, sample): sample for sample in mine}
            missing = [s for key, s in wanted.items() if self.cache.get(key, target_rows(s)) is None]
            self.counts.contexts += len(wanted)
            self.counts.cached += len(wanted) - len(missing)
            if missing:
                self._score(name, missing)

    def states(self, name: str, samples: Sequence[Sample]) -> torch.Tensor:
        """Hidden states [N, E] of the samples' target rows, sample after sample."""
        parts = []
        for sample in samples:
            found = self.cache.get(self._key(name, sample), target_rows(sample))
            if found is None:  # damaged since it was prepared
                self._score(name, [sample])
                found = self.cache.get(self._key(name, sample), target_rows(sample))
                assert found is not None, "what was just written is there"
            parts.append(found)
        return torch.cat(parts)

    def head(self, name: str) -> torch.Tensor:
        """Head [V, E] of a teacher. The one before is given up first."""
        if self._resident is None or self._resident[0] != name:
            self._resident = None
            started = time.monotonic()
            ((_, _, stored),) = read_tensors(Path(self.teachers[name].policy), only={HEAD})
            head = stored.float()
            self._check_bytes(name, {HEAD: head})
            self._resident = (name, head)
            self.counts.head_loads += 1
            self.counts.load_s += time.monotonic() - started
        return self._resident[1]

    def take_counts(self) -> Counts:
        """The counts, which start again from 0."""
        taken, self.counts = self.counts, Counts()
        return taken

    def give_up_head(self) -> None:
        """No teacher is in memory after this."""
        self._resident = None

    def _key(self, name: str, sample: Sample) -> str:
        return context_key(self.teachers[name].hash, sample.ids)

    def _score(self, name: str, samples: Sequence[Sample]) -> None:
        """One pass of the teacher over these contexts, into the cache."""
        self.give_up_head()
        model = self._model(name)
        started = time.monotonic()
        budget = max(self._budget, *(len(sample.ids) for sample in samples))
        for members in bins(samples, budget):
            chosen = [samples[i] for i in members]
            with torch.no_grad():
                found = hidden_of_targets(model, batch_of(chosen), deterministic=self._deterministic)
            if not bool(torch.isfinite(found.hidden).all()):
                raise TeacherError(
                    f"teacher {name}: its hidden states on the student's trajectories are not finite; take another "
                    f"checkpoint than {self.teachers[name].policy}"
                )
            rows = [target_rows(sample) for sample in chosen]
            parts = found.hidden.split([len(row) for row in rows])
            for sample, row, states in zip(chosen, rows, parts, strict=True):
                self.cache.put(self._key(name, sample), row, states)
        self.counts.score_s += time.monotonic() - started

    def _model(self, name: str) -> Transformer:
        teacher, started = self.teachers[name], time.monotonic()
        if name not in self._sums and policy_hash(Path(teacher.policy)) != teacher.hash:
            raise TeacherError(f"teacher {name}: {teacher.policy} has changed since the run was started")
        try:
            model = load_policy(teacher.policy)
        except (ValueError, OSError) as error:
            raise TeacherError(f"teacher {name}: {error}") from error
        self._check_bytes(name, dict(model.state_dict()))
        self.counts.model_loads += 1
        self.counts.load_s += time.monotonic() - started
        return model.eval()

    def _check_bytes(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Weights that were lost or changed under the run are noticed at the next load."""
        first = self._sums.setdefault(name, {})
        for tensor, checksum in checksums(tensors.items()).items():
            if first.setdefault(tensor, checksum) != checksum:
                raise TeacherError(
                    f"teacher {name}: {self.teachers[name].policy} holds another {tensor} than when the run was started"
                )


def target_rows(sample: Sample) -> torch.Tensor:
    """[N] int64, the rows of a context that predict a target: each stands one place before it."""
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    return torch.nonzero(mask[1:]).squeeze(1)
