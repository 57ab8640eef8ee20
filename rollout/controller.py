"""THE LOOP: slots become episodes, episodes groups, groups a batch, a batch the next policy version, and so on.

Runs in the driver; the ledger's only writer. Episodes go on while the trainer trains; how far ahead they may run, and
which groups make the next batch, is the buffer's rule (schedule=lockstep is that rule with max_offpolicy_steps = 0:
nothing is in flight while a step is taken, so a slot's policy version is fixed). Everything heavy is behind `actors`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from burnish.rollout.actors import Actors
from burnish.rollout.batch import Batch, FormBatch
from burnish.rollout.buffer import Buffer
from burnish.rollout.config import ActingRun, PacingConfig
from burnish.rollout.guard import Action, Guard, GuardTripped, Rule
from burnish.rollout.ledger import Ledger
from burnish.rollout.rollouts import Order, Rollouts
from burnish.rollout.types import DropReason, Group, RolloutError
from burnish.rollout.weight_sync import check_receipt

logger = logging.getLogger(__name__)

Log = Callable[[dict[str, float], int], None]
"""(metrics, policy version)."""
MAX_SKIPPED_IN_A_ROW = 10
"""Steps that were not finite, after which going on would only use the data up."""


GATE_ITEMS = 8
"""Rollouts on which engine and trainer are compared before the first step, at least."""


class Controller:
    """One run, from the version that is loaded to its last optimizer step.

    Args:
        run: the resolved settings.
        pacing: the loop's part of the stage's `algo`.
        order: slots of each pass over the tasks.
        form: what is made of complete groups.
        ledger: at the trainer's version.
        version: of the trainer's weights; it counts optimizer steps.
    """

    def __init__(
        self,
        run: ActingRun,
        pacing: PacingConfig,
        order: Order,
        form: FormBatch,
        ledger: Ledger,
        actors: Actors,
        log: Log,
        version: int,
    ) -> None:
        self.config, self.pacing, self.form, self.ledger = run, pacing, form, ledger
        self.actors, self.log = actors, log
        self.version = self.saved_version = self.start_version = version
        self.skipped_in_a_row = 0
        self.guard = Guard(rules=[Rule.parse(rule) for rule in run.guard])
        self.buffer = Buffer(
            groups_per_batch=pacing.groups_per_step,
            max_offpolicy_steps=pacing.max_offpolicy_steps,
            max_running=run.cluster.num_workers * run.cluster.episodes_per_worker,
            remaining_batches=run.max_steps - version,
        )
        self.rollouts = Rollouts(
            order=order,
            passes=run.passes,
            group_size=pacing.group_size,
            max_attempts=pacing.max_attempts,
            ledger=ledger,
            buffer=self.buffer,
            player=actors,
            policy_version=version,
        )

    async def run(self) -> None:
        """Until the last optimizer step, or until the data is used up."""
        self.rollouts.restore()
        await self.publish()
        try:
            while self.version < self.config.max_steps:
                self.rollouts.admit()
                groups = self.rollouts.next_groups()
                if groups is not None:
                    await self.learn(groups)
                elif self.rollouts.is_waiting:
                    await self.rollouts.an_episode_ends()
                else:
                    logger.info("The data is used up after %d optimizer steps", self.version)
                    break
        except GuardTripped as tripped:
            if tripped.action is Action.pause:
                await self.checkpoint()
            raise
        finally:
            await self.rollouts.stop()
        await self.checkpoint()

    async def learn(self, groups: Sequence[Group]) -> None:
        """One batch: groups that say nothing are dropped with a reason, the others make an optimizer step."""
        if not groups:
            # every slot of theirs was dropped before one of its episodes could be used
            self.buffer.published(False)
            return
        started, step = time.monotonic(), self.version + 1
        batch = self.form(groups, self.version, self.shared_versions())
        for reason, slot_ids in batch.drops.items():
            self.ledger.drop(slot_ids, reason, step=step)
        is_step = bool(batch.items) and await self.take_step(step, batch)
        self.buffer.published(is_step)
        failed = {f"rollout/failed/{outcome}": float(n) for outcome, n in self.rollouts.num_failures.items()}
        self.record({**batch.metrics, **failed, "rollout/step_s": time.monotonic() - started})

    async def take_step(self, step: int, batch: Batch) -> bool:
        """False when the step was not finite and changed nothing: its slots are dropped, not tried for ever."""
        if self.version == 0:
            first = batch.items[: max(self.pacing.group_size, GATE_ITEMS)]
            self.gate((await self.actors.mismatch(first))["mismatch_kl"])
        self.ledger.begin_step(step, batch.uses)
        result = await self.actors.train(f"step {step} {batch.uses[0].slot_id}", batch.items)
        if result.is_skipped:
            self.ledger.abort_step(step)
            self.ledger.drop([use.slot_id for use in batch.uses], DropReason.step_not_finite, step=step)
            self.skipped_in_a_row += 1
            self.log({"train/skipped_in_a_row": float(self.skipped_in_a_row)}, self.version)
            if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise RolloutError(f"{self.skipped_in_a_row} steps in a row were not finite; lower train.lr")
            return False
        self.skipped_in_a_row = 0
        self.ledger.commit_step(step)
        self.version = step
        self.record(result.metrics | {"train/slots": float(len(batch.uses))})
        self.gate(result.metrics.get("train/mismatch_kl_fresh", 0.0))
        if step % self.config.checkpoint_every == 0:
            await self.checkpoint()
        await self.publish()
        return True

    def record(self, metrics: Mapping[str, float]) -> None:
        """Logs what the current version was measured at.

        Raises:
            GuardTripped: a rule holds.
        """
        self.log(dict(metrics), self.version)
        self.guard.check(metrics, self.version)

    def shared_versions(self) -> dict[str, int]:
        """Up to which version the weights that played a killed driver's rollouts are ours, by slot."""
        if self.pacing.max_offpolicy_steps == 0:
            return {}  # every version is made again, of the same slots
        return dict.fromkeys(self.rollouts.restored, self.start_version)

    async def publish(self) -> None:
        """The trainer's weights to every generator; a generator that then holds anything else is fenced."""
        manifest = await self.actors.publish()
        receipts = await self.actors.swap(manifest)
        for receipt in receipts:
            check_receipt(receipt, manifest)
        self.rollouts.policy_version = self.version
        swap_s = max(receipt.seconds for receipt in receipts)
        metrics = {
            "weights/publish_s": manifest.seconds,
            "weights/swap_s": swap_s,
            "weights/bytes": manifest.size_bytes,
        }
        self.log(metrics, self.version)

    async def checkpoint(self) -> None:
        """Commit first, then save, then record: a kill in between loses no slot and trains none twice."""
        if self.saved_version < self.version:
            self.ledger.record_checkpoint(self.version, await self.actors.save())
            self.saved_version = self.version

    def gate(self, mismatch_kl: float) -> None:
        """Engine and trainer agree on the same tokens under the same weights, at launch and after every update.

        Raises:
            RolloutError: they do not.
        """
        if not mismatch_kl <= self.config.gate_max_kl:
            raise RolloutError(
                f"engine and trainer disagree: mean KL {mismatch_kl:.3g} on the same tokens and weights (version "
                f"{self.version}), gate_max_kl is {self.config.gate_max_kl:g}; such rollouts are not trained on"
            )
