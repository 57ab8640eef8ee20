"""Tables, constraints and version of the sample ledger. What the database itself refuses, no program error can do."""

import sqlite3

SCHEMA_VERSION = 3

ATTEMPTS = """(
  attempt_id TEXT PRIMARY KEY,
  slot_id TEXT NOT NULL REFERENCES slots (slot_id),
  number INTEGER NOT NULL CHECK (number >= 0),
  outcome TEXT CHECK (outcome IN ('finished', 'budget_exhausted', 'agent_crashed_env', 'infra_failed',
                                  'verifier_failed', 'cancelled')),
  stop_reason TEXT,
  reward REAL,
  is_graded INTEGER NOT NULL DEFAULT 1 CHECK (is_graded IN (0, 1)),
  trajectory TEXT,
  opened_at REAL NOT NULL,
  closed_at REAL,
  UNIQUE (slot_id, number),
  CHECK ((outcome IS NULL) = (closed_at IS NULL)),
  CHECK ((outcome IS NULL) = (stop_reason IS NULL)),
  CHECK ((reward IS NOT NULL) = (is_graded = 1 AND outcome IS NOT NULL
                                 AND outcome IN ('finished', 'budget_exhausted', 'agent_crashed_env')))
) STRICT"""
ATTEMPTS_RULES = """CREATE UNIQUE INDEX one_open_attempt_per_slot ON attempts (slot_id) WHERE outcome IS NULL;
CREATE TRIGGER outcome_is_final BEFORE UPDATE ON attempts
  WHEN OLD.outcome IS NOT NULL
  BEGIN SELECT RAISE(ABORT, 'an attempt has exactly one outcome'); END;
CREATE TRIGGER attempts_stay BEFORE DELETE ON attempts
  BEGIN SELECT RAISE(ABORT, 'attempts are never deleted'); END;
"""

# an upgrade from version n to n + 1 is MIGRATIONS[n]; run in one transaction, without foreign keys
MIGRATIONS: dict[int, str] = {
    # version 1 did not say how many tokens a use trained: the whole rollout's is the nearest that it knows
    1: """
ALTER TABLE uses ADD COLUMN num_tokens INTEGER NOT NULL DEFAULT 0 CHECK (num_tokens >= 0);
UPDATE uses SET num_tokens = (SELECT coalesce(sum(num_sampled), 0) FROM blocks WHERE blocks.attempt_id = uses.attempt_id)
  WHERE disposition = 'trained';
""",
    # version 2 knew graded attempts only; a table's CHECK is changed by making the table again (a later change of
    # ATTEMPTS must leave this one as it is)
    2: f"""
CREATE TABLE new_attempts {ATTEMPTS};
INSERT INTO new_attempts (attempt_id, slot_id, number, outcome, stop_reason, reward, trajectory, opened_at, closed_at)
  SELECT attempt_id, slot_id, number, outcome, stop_reason, reward, trajectory, opened_at, closed_at FROM attempts;
DROP TABLE attempts;
ALTER TABLE new_attempts RENAME TO attempts;
{ATTEMPTS_RULES}
""",
}

SCHEMA = f"""
CREATE TABLE slots (
  slot_id TEXT PRIMARY KEY,
  task_id TEXT NOT NULL,
  effort TEXT NOT NULL,
  group_id TEXT NOT NULL,
  group_index INTEGER NOT NULL CHECK (group_index >= 0),
  member INTEGER NOT NULL CHECK (member >= 0),
  pass_index INTEGER NOT NULL CHECK (pass_index >= 0),
  disposition TEXT NOT NULL DEFAULT 'pending'
    CHECK (disposition IN ('pending', 'ready', 'trained', 'masked', 'dropped')),
  reason TEXT,
  attempt_id TEXT REFERENCES attempts (attempt_id),
  step INTEGER,
  UNIQUE (pass_index, group_index, member),
  CHECK ((disposition = 'dropped') = (reason IS NOT NULL)),
  CHECK (disposition NOT IN ('trained', 'masked') OR step IS NOT NULL),
  CHECK (disposition NOT IN ('pending', 'ready') OR step IS NULL),
  CHECK (disposition NOT IN ('ready', 'trained', 'masked') OR attempt_id IS NOT NULL)
) STRICT;
CREATE INDEX slots_by_group ON slots (group_id);
CREATE INDEX slots_by_disposition ON slots (disposition);

CREATE TABLE attempts {ATTEMPTS};
{ATTEMPTS_RULES}CREATE TRIGGER slots_stay BEFORE DELETE ON slots
  BEGIN SELECT RAISE(ABORT, 'slots are never deleted'); END;

CREATE TABLE blocks (
  attempt_id TEXT NOT NULL REFERENCES attempts (attempt_id),
  block_index INTEGER NOT NULL CHECK (block_index >= 0),
  context_id TEXT NOT NULL,
  turn INTEGER NOT NULL CHECK (turn >= 0),
  start INTEGER NOT NULL CHECK (start >= 0),
  num_tokens INTEGER NOT NULL CHECK (num_tokens >= 0),
  num_sampled INTEGER NOT NULL CHECK (num_sampled BETWEEN 0 AND num_tokens),
  offset INTEGER NOT NULL CHECK (offset >= 0),
  size INTEGER NOT NULL CHECK (size > 0),
  digest TEXT NOT NULL CHECK (length(digest) = 64),
  PRIMARY KEY (attempt_id, block_index)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER blocks_are_immutable BEFORE UPDATE ON blocks
  BEGIN SELECT RAISE(ABORT, 'a sealed block is immutable'); END;

CREATE TABLE steps (
  step INTEGER PRIMARY KEY CHECK (step >= 1),
  state TEXT NOT NULL CHECK (state IN ('open', 'committed')),
  opened_at REAL NOT NULL,
  committed_at REAL
) STRICT;
CREATE UNIQUE INDEX one_open_step ON steps (state) WHERE state = 'open';

-- slot_id is the key: a slot is in at most one step of the lineage, which is "trained exactly once"
CREATE TABLE uses (
  slot_id TEXT PRIMARY KEY REFERENCES slots (slot_id),
  attempt_id TEXT NOT NULL UNIQUE REFERENCES attempts (attempt_id),
  step INTEGER NOT NULL REFERENCES steps (step) ON DELETE CASCADE,
  disposition TEXT NOT NULL CHECK (disposition IN ('trained', 'masked')),
  weight REAL NOT NULL,
  num_tokens INTEGER NOT NULL CHECK (num_tokens >= 0),
  CHECK ((disposition = 'masked') = (num_tokens = 0))
) STRICT, WITHOUT ROWID;
CREATE INDEX uses_by_step ON uses (step);

CREATE TABLE checkpoints (
  step INTEGER PRIMARY KEY CHECK (step >= 0),
  path TEXT NOT NULL,
  saved_at REAL NOT NULL
) STRICT;

-- every transition, never rewritten: what the other tables say now, this says how it came about
CREATE TABLE events (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  at REAL NOT NULL,
  kind TEXT NOT NULL,
  slot_id TEXT,
  attempt_id TEXT,
  step INTEGER,
  detail TEXT NOT NULL DEFAULT ''
) STRICT;
"""


class LedgerError(RuntimeError):
    """The ledger refuses a transition, or is not one this version can use."""


def prepare(db: sqlite3.Connection, name: str, *, create: bool) -> None:
    """Creates the tables in an empty database, upgrades an older one, refuses a newer one.

    Raises:
        LedgerError: not a ledger, or written by a newer version.
    """
    version = db.execute("PRAGMA user_version").fetchone()[0]
    has_tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
    if version == 0 and not has_tables and create:
        db.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
        return
    if version == 0:
        raise LedgerError(f"{name} is not a ledger (its user_version is 0)")
    if version > SCHEMA_VERSION:
        raise LedgerError(f"{name} has schema version {version}, this version of burnish reads up to {SCHEMA_VERSION}")
    has_keys = db.execute("PRAGMA foreign_keys").fetchone()[0]
    while version < SCHEMA_VERSION:
        if version not in MIGRATIONS or not create:
            raise LedgerError(f"{name} has schema version {version}; open it once for writing to upgrade it")
        # a table that others refer to is made again under its name
        db.execute("PRAGMA foreign_keys = OFF")
        db.executescript(f"BEGIN IMMEDIATE;{MIGRATIONS[version]}PRAGMA user_version = {version + 1};COMMIT;")
        version += 1
        db.execute(f"PRAGMA foreign_keys = {has_keys}")
