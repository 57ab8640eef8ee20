"""burnish doctor: what this machine has of what the quickstart needs, a line each, and what to do about the rest.

Every probe runs in a thread of its own with one deadline; one that raises or hangs becomes a FAIL that says so, and the
others still speak. Nothing here needs a network. Exit code 1 when something failed that the quickstart needs.
"""

import contextlib
import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.configs.config import DoctorRun
from burnish.configs.probes import engine, machine, software
from burnish.configs.probes.finding import Finding, Probe, Status, fail
from burnish.envs.config import SandboxKind

GRACE_S = 2.0
"""Beyond the limit that a probe hands on to what it calls, so that the callee's own word comes first."""
IMPORTED = ("burnish.rollout.container_events", "burnish.policy.encoding.tokenizer")
"""What probes import themselves, so that a missing library is a FAIL and not a traceback."""


def with_engine(run: DoctorRun) -> bool:
    """auto takes an engine that answers, so what it does wrong is in the way then too; a missing one is a warning."""
    return run.sandbox is not SandboxKind.local


def never(run: DoctorRun) -> bool:
    return False


PROBES = (
    Probe(name="python", ask=software.python),
    Probe(name="packages", ask=software.packages),
    Probe(name="torch", ask=software.torch),
    Probe(name="ray", ask=software.ray),
    Probe(name="tokenizer", ask=software.tokenizer),
    Probe(name="gpu", ask=machine.gpu, is_needed=never),
    Probe(name="cores", ask=machine.cores),
    Probe(name="memory", ask=machine.memory),
    Probe(name="disk", ask=machine.disk),
    Probe(name="inodes", ask=machine.inodes),
    Probe(name="runs", ask=machine.runs),
    Probe(name="clock", ask=machine.clock, is_needed=never),
    Probe(name="engine", ask=engine.engine, is_needed=with_engine),
    Probe(name="image", ask=engine.image, is_needed=with_engine),
    Probe(name="confinement", ask=engine.confinement, is_needed=with_engine),
    Probe(name="container", ask=engine.container, is_needed=with_engine),
    Probe(name="leftovers", ask=engine.leftovers, is_needed=never),
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One line of the result."""

    name: str
    finding: Finding
    is_needed: bool


def main(run: DoctorRun) -> int:
    """Asks everything, prints the answers; 1 when a probe failed that the quickstart needs."""
    answers = examine(run, PROBES)
    is_fit = not any(a.is_needed and a.finding.status is Status.fail for a in answers)
    sys.stdout.write((as_json(answers, is_fit) if run.json else as_lines(answers, is_fit)) + "\n")
    return 0 if is_fit else 1


def examine(run: DoctorRun, probes: Sequence[Probe]) -> list[Answer]:
    """The answer of every probe, in order; takes no longer than the limit of one."""
    found: dict[str, Finding] = {}
    # threads that import modules which import each other may see half of one; a broken one is its probe's to tell
    for module in IMPORTED:
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module(module)
    # daemons: one that hangs must not keep the process from ending
    threads = [threading.Thread(target=_ask, args=(probe, run, found), daemon=True) for probe in probes]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + run.timeout_s + GRACE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = fail(f"no answer within {run.timeout_s:g} s", "ask again with timeout_s=60; if it stays silent, it hangs")
    # a copy: a late one may still come in
    found = dict(found)
    return [Answer(name=p.name, finding=found.get(p.name, late), is_needed=p.is_needed(run)) for p in probes]


def _ask(probe: Probe, run: DoctorRun, found: dict[str, Finding]) -> None:
    """The boundary: whatever a probe suffers is its answer."""
    try:
        found[probe.name] = probe.ask(run)
    except (subprocess.TimeoutExpired, TimeoutError):
        return
    except Exception as error:  # noqa: BLE001 a doctor that dies of one finding helps nobody
        reason = " ".join(str(error).split())[:300]
        found[probe.name] = fail(
            f"cannot be told: {type(error).__name__}: {reason}", "see the reason; the others go on"
        )


def as_lines(answers: Sequence[Answer], is_fit: bool) -> str:
    """`STATUS name  what is there -> what to do`, a line a probe, then the sum."""
    width = max(len(answer.name) for answer in answers)
    lines = []
    for answer in answers:
        finding = answer.finding
        line = f"{finding.status.value:<4}  {answer.name:<{width}}  {' '.join(finding.there.split())}"
        lines.append(f"{line} -> {finding.todo}" if finding.todo else line)
    counts = {status: sum(answer.finding.status is status for answer in answers) for status in Status}
    total = f"{counts[Status.ok]} ok, {counts[Status.warn]} warnings, {counts[Status.fail]} failed"
    verdict = "the quickstart can run here" if is_fit else "the quickstart cannot run here"
    return "\n".join([*lines, f"{total}: {verdict}"])


def as_json(answers: Sequence[Answer], is_fit: bool) -> str:
    """The same for machines."""
    table: list[dict[str, Any]] = [
        {
            "name": answer.name,
            "status": answer.finding.status.value,
            "needed": answer.is_needed,
            "there": answer.finding.there,
            "todo": answer.finding.todo,
        }
        for answer in answers
    ]
    return json.dumps({"ok": is_fit, "probes": table}, indent=1)
