"""burnish audit RUN: proves that every slot of a run was trained once, masked, dropped with a reason, or is still to come.

The ledger's own constraints are not taken for granted: every rule is checked again on what the file says, and the ledger
is held against what else the run left behind: block bytes (digests), checkpoints, and the metrics of optimizer steps.
Reads only. Each check yields sentences; no sentence is the proof.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from burnish.envs.errors import UserError
from burnish.policy.training.metrics import MetricsError, read_metrics
from burnish.rollout.blocks import SUFFIX, BlockError, read_block
from burnish.rollout.config import AuditRun
from burnish.rollout.ledger_schema import LedgerError
from burnish.rollout.ledger_view import LedgerView
from burnish.rollout.types import REWARDED, BlockRef, Disposition, Trajectory

USABLE = frozenset(outcome.value for outcome in REWARDED)
MAX_SHOWN = 200
"""Violations printed; the rest is counted."""


@dataclass(kw_only=True)
class AuditReport:
    """What was counted and what was wrong."""

    slots: dict[str, int] = field(default_factory=dict)
    """By disposition; dropped ones as `dropped (reason)`."""
    attempts: dict[str, int] = field(default_factory=dict)
    """By outcome."""
    facts: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    """`check: sentence`."""

    @property
    def is_clean(self) -> bool:
        return not self.violations


def main(config: AuditRun) -> int:
    """Prints the account of a run; 0 when all holds, 1 with the violations listed."""
    report = audit(Path(config.run))
    _show(report, config.run)
    return 0 if report.is_clean else 1


def audit(run: Path) -> AuditReport:
    """Runs every check on a run folder.

    Raises:
        UserError: no such folder, or it holds no ledger.
    """
    path = run / "ledger.sqlite"
    if not path.is_file():
        raise UserError(f"{run} is not the folder of an RL run: {path} is missing")
    report = AuditReport()
    try:
        ledger = LedgerView.open(path)
    except LedgerError as error:
        report.violations.append(f"database: {error}")
        return report
    try:
        _count(ledger, report)
        for name, check in CHECKS.items():
            try:
                report.violations += [f"{name}: {sentence}" for sentence in check(ledger, run, report)]
            except (ValueError, TypeError, LookupError, OSError) as error:
                # what is not of the form it was written in is damage, and the other checks still have something to say
                report.violations.append(
                    f"{name}: cannot be checked, the run holds something else than was written: {error!r}"
                )
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        report.violations.append(f"database: {path} cannot be read further: {error}")
    finally:
        ledger.close()
    return report


def _count(ledger: LedgerView, report: AuditReport) -> None:
    sql = (
        "SELECT disposition || CASE WHEN disposition = 'dropped' THEN ' (' || coalesce(reason, '?') || ')' ELSE '' END"
        " AS what, count(*) AS n FROM slots GROUP BY what ORDER BY what"
    )
    report.slots = {row["what"]: row["n"] for row in ledger.rows(sql)}
    sql = "SELECT coalesce(outcome, 'in flight') AS what, count(*) AS n FROM attempts GROUP BY what ORDER BY what"
    report.attempts = {row["what"]: row["n"] for row in ledger.rows(sql)}
    report.facts["optimizer steps"] = ledger.last_step


def check_database(ledger: LedgerView, run: Path, report: AuditReport) -> Iterator[str]:
    """The file is whole and its references lead somewhere."""
    for row in ledger.rows("PRAGMA integrity_check"):
        if row[0] != "ok":
            yield row[0]
    for row in ledger.rows("PRAGMA foreign_key_check"):
        yield f"a row of {row['table']} refers to a row of {row['parent']} that is not there"


def check_slots(ledger: LedgerView, run: Path, report: AuditReport) -> Iterator[str]:
    """Exactly one disposition, and the one that the optimizer steps say."""
    uses: dict[str, list[sqlite3.Row]] = {}
    for use in ledger.rows("SELECT u.*, t.state FROM uses u LEFT JOIN steps t USING (step)"):
        uses.setdefault(use["slot_id"], []).append(use)
    attempts = {row["attempt_id"]: row for row in ledger.rows("SELECT * FROM attempts")}
    usable = {row["slot_id"]: row["attempt_id"] for row in attempts.values() if row["outcome"] in USABLE}
    for slot in ledger.rows("SELECT * FROM slots ORDER BY slot_id"):
        name, now = slot["slot_id"], slot["disposition"]
        mine = [use for use in uses.get(name, []) if use["state"] == "committed"]
        if now not in list(Disposition):
            yield f"slot {name} has no disposition that exists: {now!r}"
        elif now in (Disposition.trained, Disposition.masked):
            if len(mine) != 1:
                yield f"slot {name} is {now}, but stands in {len(mine)} committed optimizer steps"
            for use in mine:
                if (use["step"], use["disposition"], use["attempt_id"]) != (slot["step"], now, slot["attempt_id"]):
                    yield (
                        f"slot {name} is {now} at step {slot['step']} with attempt {slot['attempt_id']}, "
                        f"step {use['step']} says {use['disposition']} with {use['attempt_id']}"
                    )
        elif mine:
            yield f"slot {name} is {now}, but was in optimizer step {mine[0]['step']}"
        if (now == Disposition.dropped) != bool(slot["reason"]):
            yield f"slot {name} is {now} with reason {slot['reason']!r}"
        if now == Disposition.pending and name in usable:
            yield f"slot {name} is pending, but attempt {usable[name]} can be used: it was lost"
        if now in (Disposition.ready, Disposition.trained, Disposition.masked):
            attempt = attempts.get(slot["attempt_id"])
            if attempt is None or attempt["slot_id"] != name or attempt["outcome"] not in USABLE:
                yield f"slot {name} is {now} on attempt {slot['attempt_id']}, which is not one of its own that can be used"


def check_groups(ledger: LedgerView, run: Path, report: AuditReport) -> Iterator[str]:
    """One group, one task and effort; no member and no group is missing from the order."""
    sql = (
        "SELECT group_id, count(DISTINCT task_id || char(0) || effort) AS kinds, min(member) AS low, max(member) AS high,"
        " count(DISTINCT member) AS n FROM slots GROUP BY group_id ORDER BY group_id"
    )
    for row in ledger.rows(sql):
        if row["kinds"] != 1:
            yield f"group {row['group_id']} mixes {row['kinds']} tasks or efforts"
        if (row["low"], row["high"]) != (0, row["n"] - 1):
            yield f"group {row['group_id']} has {row['n']} members numbered {row['low']}..{row['high']}: a slot is missing"
    sql = (
        "SELECT pass_index, min(group_index) AS low, max(group_index) AS high, count(DISTINCT group_index) AS n"
        " FROM slots GROUP BY pass_index ORDER BY pass_index"
    )
    for row in ledger.rows(sql):
        if row["high"] - row["low"] + 1 != row["n"]:
            yield f"pass {row['pass_index']} has {row['n']} groups numbered {row['low']}..{row['high']}: a group is missing"


def check_attempts(ledger: LedgerView, run: Path, report: AuditReport) -> Iterator[str]:
    """Exactly one outcome an attempt; only rewarded outcomes carry a reward; none in flight beside a decided slot."""
    numbers: dict[str, list[int]] = {}
    sql = "SELECT a.*, s.disposition FROM attempts a LEFT JOIN slots s USING (slot_id) ORDER BY a.slot_id, a.number"
    for row in ledger.rows(sql):
        name, outcome = row["attempt_id"], row["outcome"]
        numbers.setdefault(row["slot_id"], []).append(row["number"])
        if (row["reward"] is not None) != (outcome in USABLE and bool(row["is_graded"])):
            graded = "" if row["is_graded"] else ", ungraded,"
            yield f"attempt {name} ended as {outcome}{graded} with reward {row['reward']}"
        if outcome is None and row["disposition"] != Disposition.pending:
            yield f"attempt {name} is in flight, but its slot is {row['disposition']}"
        if row["trajectory"] is None:
            if outcome in USABLE:
                yield f"attempt {name} ended as {outcome} without a trajectory"
            continue
        try:
            trajectory = Trajectory.from_dict(json.loads(row["trajectory"]))
        except (ValueError, KeyError, TypeError) as error:
            yield f"attempt {name}: its trajectory cannot be read: {error}"
            continue
        reward = trajectory.reward if trajectory.has_reward else None
        said = (trajectory.attempt_id, trajectory.outcome, reward, trajectory.is_graded)
        if said != (name, outcome, row["reward"], bool(row["is_graded"])):
            yield (
                f"attempt {name} ended as {outcome} with reward {row['reward']}, "
                f"its trajectory says {trajectory.attempt_id}, {trajectory.outcome}, {reward}"
            )
        if {ref.index: ref for ref in trajectory.blocks} != {ref.index: ref for ref in _refs(ledger, name)}:
            yield f"attempt {name}: its trajectory names other blocks than the ledger"
    for slot_id, found in numbers.items():
        if found != list(range(len(found))):
            yield f"slot {slot_id} has attempts numbered {found}: one is missing"
    for row in ledger.rows(
        "SELECT slot_id, count(*) AS n FROM attempts WHERE outcome IS NULL GROUP BY slot_id HAVING count(*) > 1"
    ):
        yield f"slot {row['slot_id']} has {row['n']} attempts in flight"


def check_blocks(ledger: LedgerView, run: Path, report: AuditReport) -> Iterator[str]:
    """Every block is there, byte for byte; contexts have no hole; what was trained has sampled tokens."""
    directory = run / "blocks"
    known = {row["attempt_id"] for row in ledger.rows("SELECT attempt_id FROM attempts")}
    trained = {r["attempt_id"] for r in ledger.rows("SELECT attempt_id FROM slots WHERE disposition = 'trained'")}
    tokens = sampled = verified = 0
    for attempt_id in sorted(known):
        ends: dict[str, int] = {}
        refs = _refs(ledger, attempt_id)
        for place, ref in enumerate(refs):
            if ref.index != place:
                yield f"attempt {attempt_id} has block {ref.index} where {place} is due: a block is missing"
                break
            if ends.get(ref.context_id, ref.start) != ref.start:
                yield (
                    f"attempt {attempt_id} context {ref.context_id}: block {ref.index} starts at {ref.start}, "
                    f"the one before ends at {ends[ref.context_id]}"
                )
            ends[ref.context_id] = ref.start + ref.num_tokens
            try:
                block = read_block(directory, ref)
            except BlockError as error:
                yield str(error)
                continue
            verified += 1
            tokens += len(block)
            sampled += int(block.sampled_T.sum())
        if attempt_id in trained and not any(ref.num_sampled for ref in refs):
            yield f"attempt {attempt_id} was trained without one sampled token"
    report.facts |= {"blocks verified": verified, "tokens in blocks": tokens, "sampled tokens": sampled}
    for path in sorted(directory.glob(f"*{SUFFIX}")) if directory.is_dir() else []:
        if path.name.removesuffix(SUFFIX) not in known:
            yield f"{path.name} belongs to no attempt of the ledger"


def check_steps(ledger: LedgerView, run: Path, report: AuditReport) -> Iterator[str]:
    """Optimizer steps 1..n without a hole, each with its slots; at most the one after them is open."""
    steps = ledger.rows("SELECT t.step, t.state, count(u.slot_id) AS n FROM steps t LEFT JOIN uses u USING (step)"
                        " GROUP BY t.step ORDER BY t.step")  # fmt: skip
    if [row["step"] for row in steps] != list(range(1, len(steps) + 1)):
        yield f"optimizer steps are {[row['step'] for row in steps]}, expected 1..{len(steps)}"
    for row in steps:
        if row["state"] != "committed" and row["step"] != steps[-1]["step"]:
            yield f"optimizer step {row['step']} is open, but step {steps[-1]['step']} followed it"
        if not row["n"]:
            yield f"optimizer step {row['step']} has no slot"
    for row in ledger.rows("SELECT slot_id, count(*) AS n FROM uses GROUP BY slot_id HAVING count(*) > 1"):
        yield f"slot {row['slot_id']} stands in {row['n']} optimizer steps"
    for row in ledger.rows("SELECT slot_id, step FROM uses WHERE step NOT IN (SELECT step FROM steps)"):
        yield f"slot {row['slot_id']} stands in optimizer step {row['step']}, which does not exist"


def check_checkpoints(ledger: LedgerView, run: Path, report: AuditReport) -> Iterator[str]:
    """No checkpoint is ahead of the ledger, and the newest one the ledger knows is on disk."""
    last = ledger.last_step
    recorded = ledger.rows("SELECT step, path FROM checkpoints ORDER BY step")
    folder = run / "checkpoints"
    on_disk = {int(p.name.split("-")[1]): p for p in folder.glob("step-*") if p.name.split("-")[1].isdigit()}
    report.facts["checkpoints on disk"] = len(on_disk)
    for step in sorted(on_disk):
        if step > last:
            yield f"checkpoint {on_disk[step]} is ahead of the ledger, which holds {last} committed steps"
        elif (held := _held_step(on_disk[step])) != step:
            yield f"checkpoint {on_disk[step]} holds the state of step {held}"
    for row in recorded:
        if row["step"] > last:
            yield f"the ledger names a checkpoint of step {row['step']}, but holds {last} committed steps"
    if recorded and recorded[-1]["step"] not in on_disk and not (run / recorded[-1]["path"]).exists():
        yield f"the newest checkpoint, step {recorded[-1]['step']}, is not on disk: {recorded[-1]['path']}"


def check_metrics(ledger: LedgerView, run: Path, report: AuditReport) -> Iterator[str]:
    """Every step up to the newest checkpoint was logged once, with as many slots as the ledger says; none beyond."""
    path = run / "metrics.jsonl"
    durable = ledger.rows("SELECT coalesce(max(step), 0) AS n FROM checkpoints")[0]["n"]
    try:
        records = [r for r in read_metrics(path) if "train/loss" in r] if path.is_file() else []
    except MetricsError as error:
        yield str(error)
        return
    logged: dict[int, list[dict]] = {}
    for record in records:
        logged.setdefault(int(record["step"]), []).append(record)
    report.facts["steps in metrics"] = len(logged)
    for step in range(1, durable + 1):
        if step not in logged:
            yield f"optimizer step {step} has no line with train/loss in metrics.jsonl"
    for step, lines in sorted(logged.items()):
        # a step is logged beside its commit: after a kill the last one may be in either alone
        if step < 1 or step > ledger.last_step + 1:
            yield f"metrics.jsonl has optimizer step {step}, the ledger holds {ledger.last_step}"
        if len(lines) > 1:
            yield f"metrics.jsonl has optimizer step {step} {len(lines)} times: it was taken twice"
        slots = lines[-1].get("train/slots")
        if slots is not None and step <= ledger.last_step and slots != len(ledger.step_slots(step)):
            yield f"optimizer step {step} was taken with {slots:g} slots, the ledger has {len(ledger.step_slots(step))}"


CHECKS: dict[str, Callable[[LedgerView, Path, AuditReport], Iterator[str]]] = {
    "database": check_database,
    "slots": check_slots,
    "groups": check_groups,
    "attempts": check_attempts,
    "blocks": check_blocks,
    "steps": check_steps,
    "checkpoints": check_checkpoints,
    "metrics": check_metrics,
}


def _refs(ledger: LedgerView, attempt_id: str) -> list[BlockRef]:
    rows = ledger.rows("SELECT * FROM blocks WHERE attempt_id = ? ORDER BY block_index", attempt_id)
    return [BlockRef(**{"index" if k == "block_index" else k: row[k] for k in row.keys()}) for row in rows]  # noqa: SIM118


def _held_step(checkpoint: Path) -> int | None:
    """The step whose state a checkpoint says it holds; None when it does not say."""
    try:
        return json.loads((checkpoint / "state.json").read_text())["num_steps"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _show(report: AuditReport, run: str) -> None:
    table = Table(title=f"audit of {run}")
    table.add_column("what")
    table.add_column("count", justify="right")
    for title, counts in (("slots", report.slots), ("attempts", report.attempts), ("", report.facts)):
        for name, count in counts.items():
            table.add_row(f"{title} {name}".strip(), str(count))
        if counts:
            table.add_section()
    table.add_row("slots in all", str(sum(report.slots.values())))
    table.add_row("violations", str(len(report.violations)))
    console = Console(soft_wrap=True)
    console.print(table)
    for sentence in report.violations[:MAX_SHOWN]:
        console.print(sentence, markup=False, highlight=False)
    if len(report.violations) > MAX_SHOWN:
        console.print(f"... and {len(report.violations) - MAX_SHOWN} more", markup=False)
