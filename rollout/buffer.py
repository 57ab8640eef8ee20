"""Groups in, batches out: which slots may start, which groups make the next batch, and how old a token may be.

Owns the one definition of staleness. The age of a token is (version being trained) - (version that sampled it); a token
older than `max_offpolicy_steps` is never trained. Two rules keep that from costing samples, whatever the durations:

- admission: a slot starts only while fewer than (max_offpolicy_steps + 1) batches of groups are started and not consumed,
  a batch that is being trained included (until its version is published, new slots still start under the old one); this
  is relative to now, so that a recovered run gets no burst. Slots start one by one, as samples finish, not by group;
- order: among completed groups the oldest go first, and a batch waits for the groups that no later batch could take in
  time. With the admission bound such a batch always exists, so progress is always possible.

Knows group ids, versions and counts; nothing of tokens, rewards or Ray.
"""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class OpenGroup:
    """A group that has started and is not consumed."""

    group_id: str
    size: int
    """Slots of the group."""
    born: int
    """Oldest policy version that any of its tokens can carry: the version at its first admission."""
    admitted: int = 0
    done: int = 0

    @property
    def is_ready(self) -> bool:
        return self.done == self.size


@dataclass(kw_only=True)
class Buffer:
    """Paced admission and oldest-first batches."""

    groups_per_batch: int
    max_offpolicy_steps: int
    max_running: int
    """Episodes in flight at once, at most."""
    remaining_batches: int
    """Batches the run will still take: nothing is started that could not be consumed."""
    open: dict[str, OpenGroup] = field(default_factory=dict)
    num_training: int = 0
    """Groups of the batch that is being trained."""

    @property
    def num_running(self) -> int:
        return sum(group.admitted - group.done for group in self.open.values())

    def may_start(self, group_id: str) -> bool:
        """True when one more slot of `group_id` may start now (a half started group is always completed)."""
        if self.num_running >= self.max_running:
            return False
        if group_id in self.open:
            return True
        batches = min(self.max_offpolicy_steps + 1, self.remaining_batches)
        return len(self.open) + self.num_training < batches * self.groups_per_batch

    def start(self, group_id: str, group_size: int, policy_version: int) -> None:
        """One slot of `group_id` starts under `policy_version`."""
        entry = self.open.setdefault(group_id, OpenGroup(group_id=group_id, size=group_size, born=policy_version))
        assert entry.admitted < entry.size, f"group {group_id} has only {entry.size} slots"
        entry.admitted += 1

    def finish(self, group_id: str) -> bool:
        """One slot of `group_id` reached an outcome; True when the group is complete."""
        entry = self.open[group_id]
        entry.done += 1
        assert entry.done <= entry.admitted, f"group {group_id}: more outcomes than starts"
        return entry.is_ready

    def restore(self, group_id: str, group_size: int, born: int, done: int) -> None:
        """A group read back from the ledger, `done` of its slots complete, waits for the rest or to be consumed."""
        self.open[group_id] = OpenGroup(group_id=group_id, size=group_size, born=born, admitted=done, done=done)

    def next_batch(self, policy_version: int, is_last: bool = False) -> list[str] | None:
        """The groups of the next batch in order of age, or None while it has to wait; they leave the buffer.

        Args:
            policy_version: the version that will be trained.
            is_last: no further slot will ever start, so a smaller batch is taken once everything is complete.
        """
        ready = sorted((g for g in self.open.values() if g.is_ready), key=lambda g: (g.born, g.group_id))
        chosen = ready[: self.groups_per_batch]
        if len(chosen) < self.groups_per_batch and not (is_last and len(ready) == len(self.open) and chosen):
            return None
        if self._must_wait(chosen, policy_version):
            return None
        for entry in chosen:
            del self.open[entry.group_id]
        self.num_training = len(chosen)
        return [entry.group_id for entry in chosen]

    def published(self, is_step: bool) -> None:
        """The batch is done with: its version is what new slots start under, or it made no step."""
        self.num_training = 0
        self.remaining_batches -= is_step

    def _must_wait(self, chosen: list[OpenGroup], policy_version: int) -> bool:
        """True when groups left behind could not all be consumed in time, and one of them is still being played.

        The j-th batch after this one trains version policy_version + j, so groups born at or before
        policy_version + j - max_offpolicy_steps must fit into j batches (j = 0: into this one). Where all of them are
        complete (after a resume there can be too many) nothing would be won: what gets too old is masked and counted.
        """
        taken = {entry.group_id for entry in chosen}
        left = [entry for entry in self.open.values() if entry.group_id not in taken]
        for batches in range(self.max_offpolicy_steps + 1):
            due = [entry for entry in left if entry.born <= policy_version + batches - self.max_offpolicy_steps]
            if len(due) > batches * self.groups_per_batch and not all(entry.is_ready for entry in due):
                return True
        return False
