"""Reading the sample ledger: counts, slots, trajectories. The writer (ledger.py) answers the same questions."""

import json
import sqlite3
import threading
from pathlib import Path

from burnish.rollout.ledger_schema import LedgerError, prepare
from burnish.rollout.types import Disposition, Slot, Trajectory


class LedgerView:
    """Questions over one connection. `LedgerView.open(path)` is read-only and may run beside the writer."""

    def __init__(self, db: sqlite3.Connection) -> None:
        db.row_factory = sqlite3.Row
        self._db = db
        self._mutex = threading.RLock()

    @classmethod
    def open(cls, path: Path) -> "LedgerView":
        """Raises:
        FileNotFoundError: no such file.
        LedgerError: not a ledger this version can read.
        """
        if not path.is_file():
            raise FileNotFoundError(f"no ledger at {path}")
        db = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        try:
            prepare(db, str(path), create=False)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # sqlite quotes damaged bytes in its messages
            db.close()
            raise LedgerError(f"cannot read the ledger {path}: {error}") from error
        except LedgerError:
            db.close()
            raise
        return cls(db)

    def close(self) -> None:
        self._db.close()

    @property
    def last_step(self) -> int:
        """Newest committed optimizer step; 0 before the first."""
        return self.rows("SELECT coalesce(max(step), 0) AS n FROM steps WHERE state = 'committed'")[0]["n"]

    def counts(self) -> dict[Disposition, int]:
        """Slots by disposition."""
        rows = self.rows("SELECT disposition, count(*) AS n FROM slots GROUP BY disposition")
        return dict.fromkeys(Disposition, 0) | {Disposition(r["disposition"]): r["n"] for r in rows}

    def drop_reasons(self) -> dict[str, int]:
        return {r["reason"]: r["n"] for r in self.rows(
            "SELECT reason, count(*) AS n FROM slots WHERE disposition = 'dropped' GROUP BY reason")}  # fmt: skip

    def slots(self, *dispositions: Disposition) -> list[Slot]:
        """Slots with one of these dispositions (all when none is named), in the run's order."""
        marks = ", ".join("?" * len(dispositions))
        where = f"WHERE disposition IN ({marks})" if dispositions else ""
        rows = self.rows(f"SELECT * FROM slots {where} ORDER BY slot_id", *[d.value for d in dispositions])
        return [slot_of(row) for row in rows]

    def disposition(self, slot_id: str) -> Disposition:
        with self._mutex:
            return self._disposition(slot_id)

    def in_flight(self) -> list[str]:
        """Attempts without an outcome."""
        return [r["attempt_id"] for r in self.rows("SELECT attempt_id FROM attempts WHERE outcome IS NULL ORDER BY 1")]

    def num_attempts(self, slot_id: str) -> int:
        return self.rows("SELECT count(*) AS n FROM attempts WHERE slot_id = ?", slot_id)[0]["n"]

    def num_failed_attempts(self, slot_id: str) -> int:
        """Tries that infrastructure or the verifier failed; cancelled and abandoned ones are nobody's fault."""
        return self.rows(
            "SELECT count(*) AS n FROM attempts WHERE slot_id = ? AND outcome IN ('infra_failed', 'verifier_failed')",
            slot_id,
        )[0]["n"]

    def trajectory(self, attempt_id: str) -> Trajectory:
        """What `close_attempt` recorded."""
        rows = self.rows("SELECT trajectory FROM attempts WHERE attempt_id = ?", attempt_id)
        if not rows or rows[0]["trajectory"] is None:
            raise LedgerError(f"attempt {attempt_id} has no recorded trajectory")
        return Trajectory.from_dict(json.loads(rows[0]["trajectory"]))

    def ready_trajectories(self) -> list[Trajectory]:
        """Trajectories of all ready slots that no open step holds, in the run's order: what a restart goes on with."""
        rows = self.rows(
            "SELECT a.trajectory FROM slots s JOIN attempts a USING (attempt_id)"
            " WHERE s.disposition = 'ready' AND s.slot_id NOT IN (SELECT slot_id FROM uses) ORDER BY s.slot_id"
        )
        return [Trajectory.from_dict(json.loads(r["trajectory"])) for r in rows]

    def step_slots(self, step: int) -> list[str]:
        """Slots of an open or committed step."""
        return [r["slot_id"] for r in self.rows("SELECT slot_id FROM uses WHERE step = ? ORDER BY slot_id", step)]

    def rows(self, sql: str, *values: object) -> list[sqlite3.Row]:
        with self._mutex:
            return self._db.execute(sql, values).fetchall()

    def _disposition(self, slot_id: str) -> Disposition:
        rows = self.rows("SELECT disposition FROM slots WHERE slot_id = ?", slot_id)
        if not rows:
            raise LedgerError(f"slot {slot_id} is not in the ledger")
        return Disposition(rows[0]["disposition"])


def slot_of(row: sqlite3.Row) -> Slot:
    """The slot of a row of the table `slots`."""
    return Slot(**{k: row[k] for k in ("task_id", "effort", "group_index", "member", "pass_index")})
