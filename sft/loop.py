"""The loop of a training run: one optimizer step a batch, metrics, training states, exact resume from a cursor.

What a batch is and what is measured beside the loss are the caller's; a batch must be a function of its cursor alone.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from burnish.policy.training.distributed import ensure_process_group, shutdown
from burnish.policy.training.metrics import MetricLogger, WandbMode
from burnish.policy.training.packing import PackedBatch
from burnish.policy.training.progress import Progress
from burnish.policy.training.step import TrainStep
from burnish.sft.data import loss_tokens
from burnish.sft.loss import nll

MAX_SKIPPED_IN_A_ROW = 20


class DivergedError(RuntimeError):
    """Step after step is not finite: going on would only burn time."""


@contextmanager
def ranks(verb: str, num_ranks: int, threads: int = 0) -> Iterator[None]:
    """The process group of a run, and its CPU threads (0: torch's own choice).

    Raises:
        ValueError: another number of processes was started.
    """
    if threads:
        torch.set_num_threads(threads)
    ensure_process_group()
    try:
        if dist.get_world_size() != num_ranks:
            raise ValueError(
                f"batch.num_ranks={num_ranks}, but {dist.get_world_size()} processes were started: `burnish {verb} "
                f"batch.num_ranks={num_ranks}` starts them; on several machines, start all of them with torchrun"
            )
        yield
    finally:
        shutdown()


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long a run is and what it leaves behind on the way."""

    title: str
    run_dir: Path
    num_batches: int
    checkpoint_every: int
    """Batches between training states; the last batch always has one."""
    wandb: str
    stop_at_loss: float = 0.0
    """Validation loss (`train/validation_loss` of what `measure` returns) at which the decay begins; 0 never."""

    def run(
        self,
        trainer: TrainStep,
        batches_at: Callable[[int], list[PackedBatch]],
        measure: Callable[[int], dict[str, float]],
    ) -> None:
        """Train up to the last batch, from the newest training state if there is one. Every rank calls it.

        Args:
            batches_at: this rank's micro-batches of the batch with a cursor, from 0.
            measure: metrics beside the step's own, after so many batches; called on every rank.

        Raises:
            DivergedError: MAX_SKIPPED_IN_A_ROW steps in a row were not finite.
        """
        resumed = trainer.load(self.run_dir / "checkpoints")
        cursor = resumed["cursor"] if resumed else 0
        end = resumed["end"] if resumed else self.num_batches
        if resumed and end != self.num_batches:
            self._end_at(trainer, resumed["end_step"])
        log = None
        if trainer.rank == 0:
            log = MetricLogger(self.run_dir, mode=WandbMode[self.wandb], resumed_from=cursor)
        skipped_in_a_row = 0
        with Progress(self.title, end, done=cursor) as progress:
            while cursor < end:
                started = time.perf_counter()
                batches = batches_at(cursor)
                metrics = trainer.step(batches, nll, denominator=loss_tokens(batches))
                seconds = time.perf_counter() - started
                cursor += 1
                skipped_in_a_row = skipped_in_a_row + 1 if metrics["train/step_skipped"] else 0
                if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                    raise DivergedError(f"{skipped_in_a_row} steps in a row were not finite; lower train.lr")
                metrics |= measure(cursor)
                if log is not None:
                    metrics["train/loss_tokens"] = metrics.pop("train/denominator")
                    metrics["train/tokens_per_s"] = sum(b.num_tokens for b in batches) * trainer.world / seconds
                    log.log(metrics, step=cursor, policy_version=trainer.num_steps)
                # every rank has measured the same value
                if end == self.num_batches and metrics.get("train/validation_loss", math.inf) <= self.stop_at_loss:
                    end = progress.total = min(end, cursor + trainer.config.decay_steps)
                    self._end_at(trainer, trainer.num_steps + end - cursor)
                # after its line: a kill between the two repeats the step, where the other order would lose the line
                if cursor % self.checkpoint_every == 0 or cursor == end:
                    extra = {"cursor": cursor, "end": end, "end_step": trainer.config.total_steps}
                    trainer.save(self.run_dir / "checkpoints", extra=extra)
                progress.advance(loss=metrics["train/loss"], lr=metrics["train/lr"])
        if log is not None:
            log.close()

    def _end_at(self, trainer: TrainStep, step: int) -> None:
        """The schedule ends with this optimizer step."""
        trainer.config = replace(trainer.config, total_steps=step)
