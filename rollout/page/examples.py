"""Trajectories to read: the first and the last that passed, the first and the last that failed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.rollout.ledger_view import LedgerView
from burnish.rollout.page.folder import Part, read_lines
from burnish.rollout.page.markup import Html, escaped, folded, joined, pre, section, tag
from burnish.rollout.types import Trajectory

PASSED = 1.0
"""Reward from which an episode is called passed here; the range of a task may say otherwise."""
WHICH = ("first passed", "last passed", "first failed", "last failed")
CONDITION = {"passed": "reward >= ?", "failed": "reward < ?", "ungraded": "reward IS NULL AND ? IS NOT NULL"}


def from_ledger(ledger: LedgerView) -> dict[str, Trajectory]:
    """Examples of an RL run; of one that grades nothing, its first and last episode."""
    found = chosen(ledger, WHICH)
    return found or chosen(ledger, ("first ungraded", "last ungraded"))


def chosen(ledger: LedgerView, wanted: Sequence[str]) -> dict[str, Trajectory]:
    """The episodes that are called so, where there are any."""
    found = {}
    for which in wanted:
        order, kind = which.split()
        sql = (
            f"SELECT attempt_id FROM attempts WHERE {CONDITION[kind]} AND trajectory IS NOT NULL"
            f" ORDER BY closed_at {'ASC' if order == 'first' else 'DESC'}, attempt_id LIMIT 1"
        )
        rows = ledger.rows(sql, PASSED)
        if rows:
            found[which] = ledger.trajectory(rows[0]["attempt_id"])
    return found


def from_lines(path: Path) -> dict[str, Trajectory]:
    """Examples of an evaluation's trajectories.jsonl."""
    records: dict[str, Mapping[str, Any]] = {}
    for record in read_lines(path):
        verdict = record.get("verdict")
        if not isinstance(verdict, dict):
            continue
        kind = "passed" if verdict.get("reward", 0.0) >= PASSED else "failed"
        records.setdefault(f"first {kind}", record)
        records[f"last {kind}"] = record
    return {which: Trajectory.from_dict(records[which]) for which in WHICH if which in records}


def examples(found: Mapping[str, Trajectory], tasks: Path | None) -> Html:
    """The trajectories, folded; one that is first and last is shown once.

    Args:
        tasks: task set folder, for the instructions, where it is still there.
    """
    shown: dict[str, list[str]] = {}
    for which, trajectory in found.items():
        shown.setdefault(trajectory.attempt_id, []).append(which)
    by_id = {trajectory.attempt_id: trajectory for trajectory in found.values()}
    if not shown:
        return tag("p", "no episode yet", class_="dim")
    return joined(_example(" and ".join(names), by_id[attempt], tasks) for attempt, names in shown.items())


def _example(which: str, trajectory: Trajectory, tasks: Path | None) -> Html:
    verdict = trajectory.verdict
    reward = (
        "" if verdict is None else f", reward {verdict.reward:g} ({verdict.tests_passed} of {verdict.tests_run} tests)"
    )
    slot = trajectory.slot
    versions = f"policy version {trajectory.version_start}"
    if trajectory.version_end != trajectory.version_start:
        versions += f" to {trajectory.version_end}"
    title = f"{which}: {slot.task_id}, slot {slot.slot_id}, {trajectory.outcome} ({trajectory.stop_reason}){reward}"
    facts = f"attempt {trajectory.attempt_id}, {versions}, {trajectory.num_sampled} sampled tokens, "
    facts += f"{trajectory.wall_s:.1f} s"
    parts: list[object] = [tag("p", facts, class_="dim")]
    if instruction := instruction_of(tasks, slot.task_id):
        parts += [tag("p", "task"), pre(instruction, "heard")]
    for turn in trajectory.turns:
        ended = "" if turn.finish_reason == "stop" else f" (cut: {turn.finish_reason})"
        parts.append(tag("p", f"turn {turn.index}: {turn.num_sampled_tokens} tokens{ended}"))
        parts.append(pre(turn.action, "said"))
        if turn.observation or turn.exit_code is not None:
            parts.append(pre(turn.observation, "heard"))
    if trajectory.error:
        parts += [tag("p", "error"), pre(trajectory.error, "bad")]
    if verdict is not None and verdict.log.strip():
        parts += [tag("p", "what the tests wrote"), pre(verdict.log, "heard")]
    return folded(escaped(title), *parts)


def instruction_of(tasks: Path | None, task_id: str) -> str:
    """instruction.md of a task; empty where it cannot be read any more."""
    if tasks is None or "/" in task_id or task_id in ("", ".", ".."):
        return ""
    try:
        return (tasks / task_id / "instruction.md").read_text("utf-8", "replace")
    except (OSError, ValueError):  # a path may hold what no path can
        return ""


def examples_section(part: Part, found: Mapping[str, Trajectory]) -> Html:
    """With the task set that the part's settings name."""
    return section("Examples", examples(found, tasks_of(part)), level=3)


def tasks_of(part: Part) -> Path | None:
    """`tasks` of config.yaml or of the evaluation's summary."""
    import yaml

    named = part.summary.get("tasks")
    try:
        settings = yaml.safe_load((part.path / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        settings = None
    if isinstance(settings, dict):
        named = settings.get("tasks") or named
    return Path(named) if isinstance(named, str) and named else None
