"""From slots to complete groups: the order of slots, admission, attempts and their outcomes, and what a restart finds.

Every attempt is opened and closed in the ledger; a slot that infrastructure or the verifier failed is tried again, and in
the end dropped with a reason, never scored. Does not know what is done with a group.
"""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from burnish.envs.task import Task
from burnish.policy.encoding.config import EncodingConfig
from burnish.rollout.buffer import Buffer
from burnish.rollout.ledger import Ledger
from burnish.rollout.types import (
    ActorGone,
    Disposition,
    DropReason,
    Group,
    RolloutError,
    Slot,
    StopReason,
    Trajectory,
)
from burnish.verifiers.types import Outcome

logger = logging.getLogger(__name__)


class Player(Protocol):
    """Whoever plays episodes."""

    async def play(self, slot: Slot, attempt_id: str, policy_version: int) -> Trajectory: ...

    async def cancel(self, attempt_ids: list[str]) -> None: ...


Order = Callable[[int], list[Slot]]
"""Slots of a pass over the tasks, in order; a function of the pass alone, so that a resumed run sees the same one."""
MIN_FAILURES_IN_A_ROW = 12
"""Fewer are an accident."""


def effort_of(encoding: EncodingConfig) -> str:
    """Effort as it stands in the prompt; `none` where the chat mode has no effort."""
    return encoding.effort if encoding.thinking else "none"


def order_of(tasks: Sequence[Task], group_size: int, effort: str, seed: int) -> Order:
    """Each pass goes through all tasks once, shuffled."""
    return lambda pass_index: slots_of_pass(tasks, pass_index, group_size, effort, seed)


def slots_of_pass(tasks: Sequence[Task], pass_index: int, group_size: int, effort: str, seed: int) -> list[Slot]:
    """Slots of one pass over the tasks, shuffled by (seed, pass): a resumed run sees the same order."""
    order = [task.id for task in tasks]
    random.Random(f"{seed}/{pass_index}").shuffle(order)
    return [
        Slot(task_id=task_id, effort=effort, group_index=index, member=member, pass_index=pass_index)
        for index, task_id in enumerate(order)
        for member in range(group_size)
    ]


class Rollouts:
    """Episodes in flight and groups that are complete.

    Args:
        order: slots of each pass.
        passes: passes at most.
        group_size: slots of a group.
        max_attempts: tries at a slot that infrastructure or the verifier failed.
        policy_version: version that answers when the run starts.
    """

    def __init__(
        self,
        *,
        order: Order,
        passes: int,
        group_size: int,
        max_attempts: int,
        ledger: Ledger,
        buffer: Buffer,
        player: Player,
        policy_version: int,
    ) -> None:
        self.policy_version = policy_version
        self.num_failures: Counter[str] = Counter()
        """Attempts that cannot be used, by outcome."""
        self.restored: frozenset[str] = frozenset()
        """Slots whose trajectories an earlier process of the run has played."""
        self._order, self._passes, self._max_attempts = order, passes, max_attempts
        self._max_failures = max(4 * group_size, MIN_FAILURES_IN_A_ROW)
        self._ledger, self._buffer, self._player = ledger, buffer, player
        self._pending: deque[Slot] = deque()
        self._sizes: dict[str, int] = {}
        self._members: dict[str, dict[str, Trajectory]] = {}
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._ended: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._failures_in_a_row = 0
        self._is_stopping = False
        self._next_pass = 0

    @property
    def is_exhausted(self) -> bool:
        """No slot will ever start again."""
        return not self._pending and self._next_pass >= self._passes

    @property
    def is_waiting(self) -> bool:
        """Episodes are in flight, or have ended since `an_episode_ends` was asked last."""
        return bool(self._playing or self._ended)

    def restore(self) -> None:
        """Takes over what the ledger holds: complete slots with their stored blocks, and those still to be played."""
        for trajectory in self._ledger.ready_trajectories():
            self._members.setdefault(trajectory.slot.group_id, {})[trajectory.slot.slot_id] = trajectory
        self.restored = frozenset(slot_id for members in self._members.values() for slot_id in members)
        pending = self._ledger.slots(Disposition.pending)
        self._sizes = dict(Counter(slot.group_id for slot in pending))
        for group_id, members in self._members.items():
            self._sizes[group_id] = self._sizes.get(group_id, 0) + len(members)
            born = min(trajectory.version_start for trajectory in members.values())
            self._buffer.restore(group_id, self._sizes[group_id], born, done=len(members))
        # a half played group comes first: batches may have to wait for it
        self._pending = deque(sorted(pending, key=lambda slot: (slot.group_id not in self._members, slot.slot_id)))
        self._next_pass = 1 + max((slot.pass_index for slot in self._ledger.slots()), default=-1)

    def admit(self) -> None:
        """Starts slots in the run's order, as far as the buffer allows."""
        while not self._is_stopping and (self._pending or self._open_pass()):
            slot = self._pending[0]
            if not self._buffer.may_start(slot.group_id):
                return
            self._pending.popleft()
            self._buffer.start(slot.group_id, self._sizes[slot.group_id], self.policy_version)
            playing = asyncio.create_task(self._play(slot))
            self._playing[slot.slot_id] = playing
            playing.add_done_callback(self._on_end)

    def next_groups(self) -> list[Group] | None:
        """Complete groups of the next batch, members in order; None while it has to wait."""
        group_ids = self._buffer.next_batch(self.policy_version, is_last=self.is_exhausted)
        if group_ids is None:
            return None
        members = [self._members.pop(group_id, {}) for group_id in group_ids]
        return [Group.of([group[slot_id] for slot_id in sorted(group)]) for group in members if group]

    async def an_episode_ends(self) -> None:
        """Waits for one that has not been told yet; each has its own deadline.

        Raises:
            RolloutError: episodes cannot be played any more.
        """
        if not self._ended:
            await self._changed.wait()
        self._changed.clear()
        ended, self._ended = self._ended, []
        for task in ended:
            task.result()

    async def stop(self) -> None:
        """Cancels what is in flight; its slots are pending again."""
        self._is_stopping = True
        try:
            if self._playing:
                await self._player.cancel(self._ledger.in_flight())
        except RolloutError as error:
            logger.warning("Episodes in flight could not be cancelled: %s", error)
            for task in self._playing.values():
                task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._playing = {slot_id: other for slot_id, other in self._playing.items() if other is not task}
        self._ended.append(task)
        self._changed.set()
        if not task.cancelled() and task.exception() is None:
            self.admit()

    async def _play(self, slot: Slot) -> None:
        """Tries a slot until one can be used, or it is dropped."""
        while True:
            attempt_id = self._ledger.open_attempt(slot.slot_id)
            try:
                trajectory = await self._player.play(slot, attempt_id, self.policy_version)
            except ActorGone as error:
                # nobody's fault, and the same trajectory again where the run is deterministic: noise goes by slot
                outcome = Outcome.cancelled
                self._ledger.close_attempt(lost_attempt(slot, attempt_id, self.policy_version, error, outcome))
                if self._is_stopping:
                    return
                continue
            except RolloutError as error:
                outcome = Outcome.infra_failed
                self._ledger.close_attempt(lost_attempt(slot, attempt_id, self.policy_version, error, outcome))
                raise
            self._ledger.close_attempt(trajectory)
            if trajectory.is_usable:
                self._failures_in_a_row = 0
                self._members.setdefault(slot.group_id, {})[slot.slot_id] = trajectory
                break
            self.num_failures[trajectory.outcome] += 1
            if trajectory.outcome is Outcome.cancelled and self._is_stopping:
                return
            self._check_health(trajectory)
            if self._ledger.num_failed_attempts(slot.slot_id) >= self._max_attempts:
                self._ledger.drop([slot.slot_id], DropReason.too_many_attempts)
                break
        self._buffer.finish(slot.group_id)

    def _check_health(self, trajectory: Trajectory) -> None:
        """Raises:
        RolloutError: so many failures in a row are no accident; going on would only use the data up.
        """
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._max_failures:
            raise RolloutError(
                f"{self._max_failures} episodes in a row failed, the last with {trajectory.outcome}: {trajectory.error}"
            )

    def _open_pass(self) -> bool:
        if self._next_pass >= self._passes:
            return False
        slots = self._order(self._next_pass)
        self._ledger.add_slots(slots)
        self._next_pass += 1
        self._pending.extend(slots)
        self._sizes |= Counter(slot.group_id for slot in slots)
        return True


def lost_attempt(slot: Slot, attempt_id: str, policy_version: int, error: RolloutError, outcome: Outcome) -> Trajectory:
    """The outcome of an attempt whose worker cannot tell it."""
    return Trajectory(
        slot=slot,
        attempt_id=attempt_id,
        outcome=outcome,
        stop_reason=StopReason.abandoned,
        error=f"{type(error).__name__}: {error}",
        version_start=policy_version,
        version_end=policy_version,
    )
