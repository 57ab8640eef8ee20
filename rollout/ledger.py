"""The sample ledger: slot -> attempts -> blocks -> outcome -> disposition, in SQLite, with one writer.

Life of a slot: `add_slots` (pending) -> `open_attempt` -> `close_attempt` (ready when the outcome is the policy's own, which
carries a reward unless the run grades nothing; else pending again) -> `begin_step` / `commit_step` (trained or masked) or `drop` (dropped, with a reason).

"Trained" means trained in the lineage of the checkpoint that is loaded. A step is committed when the optimizer has taken
it; the weights are durable only with the next checkpoint. So on `load_checkpoint(k)` every decision of a step after k is
undone: its slots are ready again, with their stored blocks, and what was in flight is abandoned and its slot pending.

Order that makes this exact under kill -9: commit_step(k) -> save checkpoint k -> record_checkpoint(k). A kill between any
two loads checkpoint k - 1 (or k) with the steps up to it committed. Every call may be repeated with the same arguments.

Durability: WAL with synchronous=NORMAL survives the death of the process at any instruction; `record_checkpoint` and
`snapshot` fsync, so after a power cut the ledger is never behind the newest checkpoint it knows.
"""

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.rollout.ledger_schema import LedgerError, prepare
from burnish.rollout.ledger_view import LedgerView, slot_of
from burnish.rollout.types import Disposition, DropReason, Slot, StopReason, Trajectory
from burnish.verifiers.types import Outcome


@dataclass(frozen=True, kw_only=True)
class Use:
    """One slot's part in an optimizer step."""

    slot_id: str
    weight: float
    """Loss weight of the trajectory, as the trainer applied it."""
    num_tokens: int
    """Sampled tokens that carry loss."""

    @property
    def is_masked(self) -> bool:
        """Every token was too old: consumed, not trained."""
        return self.num_tokens == 0


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What loading a checkpoint changed."""

    step: int
    abandoned: tuple[str, ...]
    """Attempts that were in flight."""
    returned: tuple[str, ...]
    """Slots of undone steps: ready again."""


class Ledger(LedgerView):
    """The only writer. A second one on the same file is refused as long as the first lives (also after its kill -9,
    the lock is free at once)."""

    def __init__(self, path: Path, *, wait_s: float = 0.0) -> None:
        """Opens, or creates, for writing.

        Args:
            wait_s: how long to wait for another writer to go: actors outlive a killed driver by seconds.

        Raises:
            LedgerError: another process writes it, or it is not a ledger this version can use.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock_fd = _take_lock(path.with_name(path.name + ".lock"), wait_s)
        super().__init__(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            prepare(self._db, str(path), create=True)
        except (LedgerError, sqlite3.DatabaseError) as error:
            self.close()
            raise LedgerError(f"cannot open the ledger {path}: {error}") from error

    def close(self) -> None:
        super().close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- slots and attempts

    def add_slots(self, slots: Iterable[Slot]) -> int:
        """Adds slots as pending; ones that are there already stay as they are. Returns how many were new.

        Raises:
            LedgerError: a slot of this position exists with another task or effort, or its group has another one.
        """
        added = 0
        with self._transaction() as db:
            for slot in slots:
                kinds = db.execute("SELECT DISTINCT task_id, effort FROM slots WHERE group_id = ?", (slot.group_id,))
                for row in kinds.fetchall():
                    if tuple(row) != (slot.task_id, slot.effort):
                        raise LedgerError(
                            f"group {slot.group_id} is task {row['task_id']} at effort {row['effort']}, "
                            f"slot {slot.slot_id} says {slot.task_id} at {slot.effort}"
                        )
                done = db.execute(
                    "INSERT OR IGNORE INTO slots (slot_id, task_id, effort, group_id, group_index, member, pass_index)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        slot.slot_id,
                        slot.task_id,
                        slot.effort,
                        slot.group_id,
                        slot.group_index,
                        slot.member,
                        slot.pass_index,
                    ),
                ).rowcount
                if done:
                    added += 1
                    self._event(db, "slot_added", slot_id=slot.slot_id)
        return added

    def open_attempt(self, slot_id: str) -> str:
        """Starts a try at a pending slot and returns its id. While one is in flight, that one's id comes back."""
        with self._transaction() as db:
            self._expect(slot_id, Disposition.pending)
            row = db.execute(
                "SELECT attempt_id FROM attempts WHERE slot_id = ? AND outcome IS NULL", (slot_id,)
            ).fetchone()
            if row is not None:
                return row["attempt_id"]
            slot = db.execute("SELECT * FROM slots WHERE slot_id = ?", (slot_id,)).fetchone()
            number = db.execute("SELECT count(*) FROM attempts WHERE slot_id = ?", (slot_id,)).fetchone()[0]
            attempt_id = slot_of(slot).attempt_id(number)
            db.execute(
                "INSERT INTO attempts (attempt_id, slot_id, number, opened_at) VALUES (?, ?, ?, ?)",
                (attempt_id, slot_id, number, time.time()),
            )
            self._event(db, "attempt_opened", slot_id=slot_id, attempt_id=attempt_id)
            return attempt_id

    def close_attempt(self, trajectory: Trajectory) -> Disposition:
        """Records the attempt's one outcome with its blocks (sealed and fsynced before this call).

        The same trajectory again is a no-op, whatever became of the slot since.

        Returns:
            The slot's disposition now: ready, or pending when the attempt cannot be used.

        Raises:
            LedgerError: unknown attempt, or it already has another outcome.
        """
        attempt_id, slot_id = trajectory.attempt_id, trajectory.slot.slot_id
        text = json.dumps(trajectory.to_dict(), sort_keys=True)
        with self._transaction() as db:
            row = db.execute("SELECT * FROM attempts WHERE attempt_id = ?", (attempt_id,)).fetchone()
            if row is None or row["slot_id"] != slot_id:
                raise LedgerError(f"attempt {attempt_id} of slot {slot_id} was never opened")
            if row["outcome"] is not None:
                if row["trajectory"] != text:
                    raise LedgerError(
                        f"attempt {attempt_id} already ended as {row['outcome']}, got {trajectory.outcome}"
                    )
                return self._disposition(slot_id)
            self._end_attempt(db, trajectory.outcome, trajectory.stop_reason, attempt_id, slot_id, text,
                              trajectory.reward if trajectory.has_reward else None, trajectory.is_graded)  # fmt: skip
            db.executemany(
                "INSERT INTO blocks VALUES (:attempt_id, :index, :context_id, :turn, :start, :num_tokens, :num_sampled,"
                " :offset, :size, :digest)",
                [vars(ref) for ref in trajectory.blocks],
            )
            if trajectory.is_usable:
                db.execute(
                    "UPDATE slots SET disposition = 'ready', attempt_id = ? WHERE slot_id = ?", (attempt_id, slot_id)
                )
            return self._disposition(slot_id)

    def drop(self, slot_ids: Sequence[str], reason: DropReason | str, step: int | None = None) -> None:
        """Drops pending or ready slots for good; an attempt in flight is cancelled.

        Args:
            step: the optimizer step being formed when this was decided; loading an earlier checkpoint undoes the drop.
        """
        if not reason:
            raise LedgerError("a slot is dropped with a reason")
        with self._transaction() as db:
            for slot_id in slot_ids:
                row = db.execute("SELECT disposition, reason FROM slots WHERE slot_id = ?", (slot_id,)).fetchone()
                if row is not None and tuple(row) == ("dropped", str(reason)):
                    continue
                self._expect(slot_id, Disposition.pending, Disposition.ready)
                self._abandon(db, "slot_id = ?", slot_id, StopReason.cancelled)
                if db.execute("SELECT 1 FROM uses WHERE slot_id = ?", (slot_id,)).fetchone():
                    raise LedgerError(f"slot {slot_id} is in the open optimizer step; abort or commit that first")
                db.execute(
                    "UPDATE slots SET disposition = 'dropped', reason = ?, step = ? WHERE slot_id = ?",
                    (str(reason), step, slot_id),
                )
                self._event(db, "dropped", slot_id=slot_id, step=step, detail=str(reason))

    # -- optimizer steps and checkpoints

    def begin_step(self, step: int, uses: Sequence[Use]) -> None:
        """Takes ready slots into optimizer step `step` (1, 2, ...), before the trainer is asked for it.

        Raises:
            LedgerError: the step is not the next one, is open with other slots, or a slot is not ready.
        """
        wanted = {use.slot_id: (use.weight, "masked" if use.is_masked else "trained", use.num_tokens) for use in uses}
        if len(wanted) != len(uses) or not uses:
            raise LedgerError(
                f"step {step}: a batch needs slots, each once; got {len(uses)} with {len(wanted)} distinct"
            )
        with self._transaction() as db:
            row = db.execute("SELECT state FROM steps WHERE step = ?", (step,)).fetchone()
            if row is not None:
                rows = db.execute("SELECT * FROM uses WHERE step = ?", (step,)).fetchall()
                if {r["slot_id"]: (r["weight"], r["disposition"], r["num_tokens"]) for r in rows} != wanted:
                    raise LedgerError(f"step {step} is {row['state']} with other slots or weights")
                return
            last = db.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0]
            if step != last + 1 or db.execute("SELECT 1 FROM steps WHERE state = 'open'").fetchone():
                raise LedgerError(
                    f"step {step} cannot begin: the last step is {last}, and steps come one after another"
                )
            db.execute("INSERT INTO steps (step, state, opened_at) VALUES (?, 'open', ?)", (step, time.time()))
            for slot_id, (weight, disposition, num_tokens) in wanted.items():
                self._expect(slot_id, Disposition.ready)
                db.execute(
                    "INSERT INTO uses (slot_id, attempt_id, step, disposition, weight, num_tokens)"
                    " SELECT slot_id, attempt_id, ?, ?, ?, ? FROM slots WHERE slot_id = ?",
                    (step, disposition, weight, num_tokens, slot_id),
                )
            self._event(db, "step_begun", step=step, detail=f"{len(uses)} slots")

    def commit_step(self, step: int) -> None:
        """The optimizer has taken the step: its slots are trained (or masked)."""
        with self._transaction() as db:
            row = db.execute("SELECT state FROM steps WHERE step = ?", (step,)).fetchone()
            if row is None:
                raise LedgerError(f"step {step} was never begun")
            if row["state"] == "committed":
                return
            db.execute("UPDATE steps SET state = 'committed', committed_at = ? WHERE step = ?", (time.time(), step))
            db.execute(
                "UPDATE slots SET disposition = uses.disposition, step = uses.step"
                " FROM uses WHERE uses.slot_id = slots.slot_id AND uses.step = ?",
                (step,),
            )
            self._event(db, "step_committed", step=step)

    def abort_step(self, step: int) -> None:
        """The optimizer did not take the step (skipped, failed): its slots stay ready."""
        with self._transaction() as db:
            if db.execute("DELETE FROM steps WHERE step = ? AND state = 'open'", (step,)).rowcount:
                self._event(db, "step_aborted", step=step)

    def record_checkpoint(self, step: int, path: str) -> None:
        """The checkpoint after `step` is on disk. Fsyncs the ledger."""
        with self._transaction() as db:
            if step > self.last_step:
                raise LedgerError(f"checkpoint {step}: only {self.last_step} steps are committed")
            db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (step, path, time.time()))
            self._event(db, "checkpoint", step=step, detail=path)
        self.sync()

    def load_checkpoint(self, step: int) -> Restored:
        """Makes the ledger the one of checkpoint `step` (0 = the initial policy); call it at every start of a run.

        Slots decided after it are ready again (their tokens may carry versions above `step`), attempts in flight are
        abandoned and their slots pending. Attempts, outcomes, blocks and events stay.

        Raises:
            LedgerError: the ledger does not hold all steps up to `step`: it is older than the checkpoint.
        """
        with self._transaction() as db:
            if step < 0 or step > self.last_step:
                raise LedgerError(
                    f"checkpoint {step} is ahead of the ledger, which holds {self.last_step} committed steps"
                )
            abandoned = self._abandon(db, "1 = ?", 1, StopReason.abandoned)
            db.execute("DELETE FROM steps WHERE step > ?", (step,))  # its uses go with it
            returned = [
                r["slot_id"] for r in db.execute("SELECT slot_id FROM slots WHERE step > ? ORDER BY slot_id", (step,))
            ]
            # a slot that was dropped before it had a usable attempt goes back to pending
            db.execute(
                "UPDATE slots SET disposition = CASE WHEN attempt_id IS NULL THEN 'pending' ELSE 'ready' END,"
                " reason = NULL, step = NULL WHERE step > ?",
                (step,),
            )
            db.execute("DELETE FROM checkpoints WHERE step > ?", (step,))
            self._event(
                db, "checkpoint_loaded", step=step, detail=f"{len(returned)} returned, {len(abandoned)} abandoned"
            )
            return Restored(step=step, abandoned=tuple(abandoned), returned=tuple(returned))

    # -- files

    def sync(self) -> None:
        """Everything committed so far is on disk when this returns."""
        with self._mutex:
            self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def snapshot(self, path: Path) -> None:
        """Writes a consistent copy, atomically: readers see the old one or the new one."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        copy = sqlite3.connect(temporary)
        try:
            with self._mutex:
                self._db.backup(copy)
            # a copy in WAL mode could not be read from a read-only folder
            copy.execute("PRAGMA journal_mode = DELETE")
        finally:
            copy.close()
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)

    # -- inside a transaction

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _event(self, db: sqlite3.Connection, kind: str, **values: object) -> None:
        event: dict[str, Any] = {"slot_id": None, "attempt_id": None, "step": None, "detail": "", **values}
        db.execute(
            "INSERT INTO events (at, kind, slot_id, attempt_id, step, detail)"
            " VALUES (:at, :kind, :slot_id, :attempt_id, :step, :detail)",
            {"at": time.time(), "kind": kind, **event},
        )

    def _expect(self, slot_id: str, *allowed: Disposition) -> None:
        now = self._disposition(slot_id)
        if now not in allowed:
            raise LedgerError(f"slot {slot_id} is {now}, expected {' or '.join(allowed)}")

    def _abandon(self, db: sqlite3.Connection, where: str, value: object, stop: StopReason) -> list[str]:
        rows = db.execute(
            f"SELECT attempt_id, slot_id FROM attempts WHERE outcome IS NULL AND {where} ORDER BY attempt_id", (value,)
        ).fetchall()
        for row in rows:
            self._end_attempt(db, Outcome.cancelled, stop, row["attempt_id"], row["slot_id"], None, None)
        return [row["attempt_id"] for row in rows]

    def _end_attempt(
        self,
        db: sqlite3.Connection,
        outcome: Outcome,
        stop: StopReason,
        attempt_id: str,
        slot_id: str,
        trajectory: str | None,
        reward: float | None,
        is_graded: bool = True,
    ) -> None:
        db.execute(
            "UPDATE attempts SET outcome = ?, stop_reason = ?, reward = ?, is_graded = ?, trajectory = ?, closed_at = ?"
            " WHERE attempt_id = ?",
            (outcome.value, stop.value, reward, is_graded, trajectory, time.time(), attempt_id),
        )
        self._event(
            db, "attempt_closed", slot_id=slot_id, attempt_id=attempt_id, detail=f"{outcome.value} {stop.value}"
        )


def _take_lock(path: Path, wait_s: float) -> int:
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            holder = os.read(fd, 32).decode().strip()
            os.close(fd)
            raise LedgerError(f"{path.with_suffix('')} is being written by process {holder or '?'}") from error
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd
