"""What a task set says about itself: counts, gates, seconds, seed - as numbers in taskset.json and as DATASHEET.md."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from burnish.envs.synthesis.gates import GateReport
from burnish.envs.synthesis.propose import Cell

# in the order they are run
GATES = ("oracle", "nop")


def _gate(name: str, reports: Sequence[GateReport]) -> dict[str, Any]:
    """A gate that was reached either passed or is named in the reason."""
    reached = [
        report
        for report in reports
        if report.accepted or GATES.index(report.reason.partition(":")[0]) >= GATES.index(name)
    ]
    failed = sum(report.reason.startswith(f"{name}:") for report in reached)
    passed = len(reached) - failed
    return {"run": len(reached), "passed": passed, "rate": round(passed / len(reached), 4) if reached else None}


def datasheet(
    *,
    settings: dict[str, Any],
    cells: Iterable[Cell],
    reports: Sequence[GateReport],
    num_duplicates: int,
    num_demonstrations: int,
    num_resumed: int,
    sandbox: str,
    seconds: float,
) -> dict[str, Any]:
    """The numbers.

    Args:
        settings: what the tasks are a function of.
        cells: of the admitted tasks, one each.
        reports: of every candidate that was gated, rejected ones included; empty when the gates were off.
        num_duplicates: candidates dropped before any gate.
        num_demonstrations: oracle trajectories that belong to no task.
        num_resumed: reports taken over from an interrupted run.
        sandbox: kind of sandbox the gates ran in.
        seconds: wall clock of this run.
    """
    counts: dict[str, Counter[str]] = {"split": Counter(), "family": Counter(), "difficulty": Counter()}
    for cell in cells:
        counts["split"][cell.split] += 1
        counts["family"][f"{cell.split}/{cell.family}"] += 1
        counts["difficulty"][f"{cell.split}/{cell.difficulty}"] += 1
    return {
        "settings": settings,
        "counts": {name: dict(sorted(counter.items())) for name, counter in counts.items()},
        "proposed": len(reports) + num_duplicates if reports else sum(counts["split"].values()) + num_duplicates,
        "duplicates": num_duplicates,
        "gates": {name: _gate(name, reports) for name in GATES},
        "rejected": {report.task_id: report.reason for report in reports if not report.accepted},
        "demonstrations": num_demonstrations,
        "oracle_turns": sum(len(report.turns) for report in reports if report.accepted),
        "contamination": {"leaks": 0},
        "sandbox": sandbox,
        "gate_seconds": round(sum(report.seconds for report in reports), 1),
        "gates_resumed": num_resumed,
        "seconds": round(seconds, 1),
    }


def render(sheet: dict[str, Any]) -> str:
    """The same for people, as Markdown."""
    families: dict[str, dict[str, int]] = {}
    for key, count in sheet["counts"]["family"].items():
        split, _, family = key.partition("/")
        families.setdefault(family, {})[split] = count
    splits = list(sheet["counts"]["split"])
    lines = [
        "# Task set",
        "",
        f"Synthetic {sheet['settings']['domain']} tasks in the Harbor format, made by `burnish synth`. "
        "Licence: Apache-2.0; no third-party text.",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in sheet["settings"].items()),
        f"| sandbox of the gates | {sheet['sandbox']} |",
        f"| seconds | {sheet['seconds']} |",
        "",
        "## Tasks",
        "",
        f"| family | {' | '.join(splits)} |",
        "|---|" + "---:|" * len(splits),
        *(f"| {name} | {' | '.join(str(row.get(split, 0)) for split in splits)} |" for name, row in families.items()),
        f"| all | {' | '.join(str(sheet['counts']['split'][split]) for split in splits)} |",
        "",
        "| split / difficulty | tasks |",
        "|---|---:|",
        *(f"| {name} | {count} |" for name, count in sheet["counts"]["difficulty"].items()),
        "",
        "## Gates",
        "",
        f"{sheet['proposed']} candidates were proposed, {sheet['duplicates']} of them dropped as duplicates.",
        "",
        "| gate | run | passed | rate |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {gate['run']} | {gate['passed']} | {gate['rate']} |" for name, gate in sheet["gates"].items()),
        "",
        *(f"- rejected `{name}`: {reason}" for name, reason in sheet["rejected"].items()),
        f"Demonstrations for SFT beyond the tasks: {sheet['demonstrations']}.",
        "",
        f"Contamination scan: {sheet['contamination']['leaks']} pieces of held-out tasks found in training tasks.",
        "",
    ]
    return "\n".join(lines)
