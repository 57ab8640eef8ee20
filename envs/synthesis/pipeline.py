"""`burnish synth`: propose, write, gate, scan, and only then declare a task set.

A directory is a task set once it holds taskset.json; until then it holds the journal of gate reports, and the same
command takes an interrupted run up where it stopped. The verifier is found by import path: this folder may not import
the one above it.
"""

import importlib
import json
import logging
import os
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.envs.config import SynthRun
from burnish.envs.errors import UserError
from burnish.envs.sandbox.base import SandboxFactory, open_sandboxes
from burnish.envs.synthesis.contamination import scan_contamination
from burnish.envs.synthesis.datasheet import datasheet, render
from burnish.envs.synthesis.gates import GateReport, Gates, Grader
from burnish.envs.synthesis.generate import GENERATOR_VERSION
from burnish.envs.synthesis.journal import Journal
from burnish.envs.synthesis.progress import ProgressLine
from burnish.envs.synthesis.propose import Candidate, Cell, Proposer, quotas
from burnish.envs.synthesis.transcript import messages
from burnish.envs.synthesis.words import SPLITS
from burnish.envs.synthesis.write import write_task
from burnish.envs.task import load_task

logger = logging.getLogger(__name__)

# rounds of replacing rejected candidates before the families are called broken
MAX_ROUNDS = 5
JOURNAL = ".synth-journal.jsonl"


class SynthesisError(RuntimeError):
    """Our own families or splits are wrong: too many candidates fail, or a held-out piece is in a training task."""


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A candidate that became a task."""

    candidate: Candidate
    report: GateReport | None
    """None when the gates were off."""


def main(run: SynthRun) -> int:
    """Make the task set that `run` describes, or finish it."""
    out = Path(run.out)
    if (out / "taskset.json").exists() and _settings_of(out) == settings(run):
        logger.info("%s is already the task set of these settings", out)
        return 0
    sandboxes = open_sandboxes(run.limits, run.sandbox)
    try:
        sheet = synthesize(run, sandboxes, load_grader(run.verifier, sandboxes))
    finally:
        sandboxes.close()
    counts = ", ".join(f"{count} {split}" for split, count in sheet["counts"]["split"].items())
    logger.info("%s: %s tasks in %.1f s; read %s", out, counts, sheet["seconds"], out / "DATASHEET.md")
    return 0


def load_grader(path: str, sandboxes: SandboxFactory) -> Grader:
    """The verifier class at `package.module:Class`, made with the sandboxes.

    Raises:
        UserError: the path does not lead to one.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(sandboxes)
    except (ValueError, ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"verifier={path!r} is not an import path `package.module:Class`: {error}") from error


def settings(run: SynthRun) -> dict[str, Any]:
    """What the tasks are a function of: two runs that agree in this make the same tasks."""
    return {
        "generator_version": GENERATOR_VERSION,
        "seed": run.seed,
        "num_train": run.num_train,
        "num_heldout": run.num_heldout,
        "families": sorted(set(run.families)),
        "difficulty": sorted(set(run.difficulty)),
        "num_words": run.num_words,
        "gates": run.gates,
        "verifier": run.verifier,
    }


def _settings_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "taskset.json").read_text()).get("datasheet", {}).get("settings", {})


def synthesize(run: SynthRun, sandboxes: SandboxFactory, grader: Grader) -> dict[str, Any]:
    """Fill every quota with gated tasks and write the task set.

    Returns:
        The numbers of the datasheet.

    Raises:
        UserError: the directory holds something else.
        SynthesisError: the gates reject too much, or the contamination scan finds something.
        SandboxError: the infrastructure keeps failing; the same command goes on later.
    """
    started = time.monotonic()
    wanted = quotas(run)
    journal = _open_journal(run)
    known = {record["task_id"]: GateReport.from_json(record) for record in journal.records[1:]}
    num_resumed = len(known)
    proposer = Proposer(run.seed, run.num_words)
    gates = Gates(sandboxes, grader, run_id=f"synth-{Path(run.out).name}")
    admitted: list[Admitted] = []
    filled: Counter[Cell] = Counter()
    try:
        for _ in range(MAX_ROUNDS):
            batch = [proposer.propose(cell) for cell, quota in wanted.items() for _ in range(quota - filled[cell])]
            if not batch:
                break
            _write(batch, Path(run.out), known)
            if run.gates:
                _gate([candidate for candidate in batch if candidate.id not in known], run, gates, journal, known)
            for candidate in batch:
                report = known.get(candidate.id)
                if report is None or report.accepted:
                    admitted.append(Admitted(candidate=candidate, report=report))
                    filled[candidate.cell] += 1
                else:
                    logger.warning("%s was rejected by %s", candidate.id, report.reason)
                    shutil.rmtree(Path(run.out) / candidate.id, ignore_errors=True)
        else:
            last = next((report.reason for report in reversed(known.values()) if not report.accepted), "")
            raise SynthesisError(
                f"{MAX_ROUNDS} rounds of candidates did not fill the quotas; the last rejection: {last}"
            )
    finally:
        journal.close()
    _refuse_leaks(Path(run.out), admitted)
    sheet = datasheet(
        settings=settings(run),
        cells=[task.candidate.cell for task in admitted],
        reports=list(known.values()),
        num_duplicates=proposer.num_duplicates,
        num_resumed=num_resumed,
        sandbox=sandboxes.kind.name,
        seconds=time.monotonic() - started,
    )
    _publish(Path(run.out), run, admitted, sheet)
    return sheet


def _open_journal(run: SynthRun) -> Journal:
    """The journal of this very run; its first record is the settings."""
    out = Path(run.out)
    if out.exists() and any(out.iterdir()) and not (out / JOURNAL).exists():
        raise UserError(f"out={run.out} is not empty and not an unfinished task set; give another out= or remove it")
    journal = Journal(out / JOURNAL)
    if not journal.records:
        journal.append(settings(run))
    elif journal.records[0] != settings(run):
        journal.close()
        raise UserError(f"out={run.out} holds a task set of other settings; give another out= or remove it")
    return journal


def _write(batch: list[Candidate], out: Path, known: dict[str, GateReport]) -> None:
    """Write the candidates' folders; the journal's reports must be about these very bytes."""
    for candidate in batch:
        task = load_task(write_task(candidate.spec, candidate.id, out))
        report = known.get(candidate.id)
        if report and report.content_hash != task.content_hash:
            raise UserError(f"{out}: {candidate.id} was gated with other content; remove the directory and start again")


def _gate(batch: list[Candidate], run: SynthRun, gates: Gates, journal: Journal, known: dict[str, GateReport]) -> None:
    """Gate candidates in parallel; each report is in the journal before it counts."""
    if not batch:
        return
    pool = ThreadPoolExecutor(max_workers=run.workers, thread_name_prefix="gate")
    try:
        futures = [
            pool.submit(gates.check, load_task(Path(run.out) / candidate.id), candidate.spec.turns)
            for candidate in batch
        ]
        with ProgressLine("Gating candidates", len(futures)) as progress:
            for future in as_completed(futures):
                report = future.result()
                journal.append(report.to_json())
                known[report.task_id] = report
                progress.advance()
    finally:
        # on an error or Ctrl-C: candidates that have not begun never begin, those that have close their sandboxes
        pool.shutdown(wait=True, cancel_futures=True)


def _refuse_leaks(out: Path, admitted: list[Admitted]) -> None:
    folders = {
        split: [out / task.candidate.id for task in admitted if task.candidate.cell.split == split] for split in SPLITS
    }
    if leaks := scan_contamination(folders["train"], folders["heldout"]):
        first = leaks[0]
        raise SynthesisError(
            f"{len(leaks)} pieces of held-out tasks occur in training tasks; the first: the {first.kind} "
            f"{first.text!r} of {first.heldout_id} in {first.train_id}"
        )


def _publish(out: Path, run: SynthRun, admitted: list[Admitted], sheet: dict[str, Any]) -> None:
    """Everything beside the task folders; taskset.json comes last, on a disk that holds all the rest."""
    by_split = {
        split: sorted(
            (task for task in admitted if task.candidate.cell.split == split), key=lambda task: task.candidate.id
        )
        for split in SPLITS
    }
    for split, tasks in by_split.items():
        lines = [json.dumps(_oracle_record(task)) + "\n" for task in tasks if task.report]
        _write_atomically(out / f"oracle-{split}.jsonl", "".join(lines))
    _write_atomically(out / "DATASHEET.md", render(sheet))
    os.sync()
    taskset = {
        "version": 1,
        "seed": run.seed,
        "splits": {split: [task.candidate.id for task in tasks] for split, tasks in by_split.items()},
        "tasks": {
            task.candidate.id: {"family": task.candidate.cell.family, "difficulty": task.candidate.cell.difficulty}
            for tasks in by_split.values()
            for task in tasks
        },
        "datasheet": sheet,
    }
    _write_atomically(out / "taskset.json", json.dumps(taskset, indent=1) + "\n")


def _oracle_record(task: Admitted) -> dict[str, Any]:
    """One oracle trajectory as sft reads it, with the raw turns beside the messages."""
    assert task.report is not None
    cell = task.candidate.cell
    return {
        "task_id": task.candidate.id,
        "domain": "terminal",
        "family": cell.family,
        "difficulty": cell.difficulty,
        "split": cell.split,
        "reward": task.report.oracle_reward,
        "turns": [turn.to_json() for turn in task.report.turns],
        "messages": messages(task.candidate.spec.instruction, task.report.turns),
    }


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
