"""`burnish synth`: propose, write, gate, scan, and only then declare a task set.

A directory is a task set once it holds taskset.json; until then it holds the journal of gate reports, and the same
command takes an interrupted run up where it stopped. The verifier is found by import path: this folder may not import
the one above it.
"""

import importlib
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from burnish.envs.config import SynthRun
from burnish.envs.errors import UserError
from burnish.envs.sandbox.base import SandboxFactory, open_sandboxes
from burnish.envs.synthesis.contamination import scan_contamination
from burnish.envs.synthesis.datasheet import datasheet
from burnish.envs.synthesis.demonstrate import demonstrate_all
from burnish.envs.synthesis.gates import GateReport, Gates, Grader
from burnish.envs.synthesis.generate import GENERATOR_VERSION
from burnish.envs.synthesis.journal import Journal
from burnish.envs.synthesis.progress import ProgressLine
from burnish.envs.synthesis.propose import Candidate, Cell, Proposer, quotas, spread
from burnish.envs.synthesis.publish import Trajectory, write_index, write_transcripts
from burnish.envs.synthesis.transcript import RecordedTurn
from burnish.envs.synthesis.words import DEMONSTRATION, SPLITS
from burnish.envs.synthesis.write import write_task
from burnish.envs.task import load_task
from burnish.envs.taskset import read_index

logger = logging.getLogger(__name__)

# rounds of replacing rejected candidates before the families are called broken
MAX_ROUNDS = 5
JOURNAL = ".synth-journal.jsonl"
# what is lost when a run is killed, and what one container's start is shared by
DEMONSTRATIONS_PER_SANDBOX = 50
T = TypeVar("T")


class SynthesisError(RuntimeError):
    """Our own families or splits are wrong: too many candidates fail, or a held-out piece is in a training task."""


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
    logger.info("%s: %s %s tasks in %.1f s; read %s", out, counts, run.domain, sheet["seconds"], out / "DATASHEET.md")
    return 0


def load_grader(path: str, sandboxes: SandboxFactory) -> Grader:
    """The verifier class at `package.module:Class`, made with the sandboxes.

    Raises:
        UserError: the path does not lead to one.
    """
    module, _, name = path.partition(":")
    try:
        grader = getattr(importlib.import_module(module), name)
    except (ValueError, ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"verifier={path!r} is not an import path `package.module:Class`: {error}") from error
    return grader(sandboxes)


def settings(run: SynthRun) -> dict[str, Any]:
    """What the tasks are a function of: two runs that agree in this make the same tasks."""
    return {
        "generator_version": GENERATOR_VERSION,
        "domain": str(run.domain),
        "seed": run.seed,
        "num_train": run.num_train,
        "num_heldout": run.num_heldout,
        "num_demonstrations": run.num_demonstrations,
        "families": sorted(set(run.families)),
        "difficulty": sorted(set(run.difficulty)),
        "num_words": run.num_words,
        "gates": run.gates,
        "verifier": run.verifier,
    }


def _settings_of(out: Path) -> dict[str, Any]:
    sheet = read_index(out / "taskset.json").get("datasheet")
    return sheet.get("settings", {}) if isinstance(sheet, dict) else {}


def synthesize(run: SynthRun, sandboxes: SandboxFactory, grader: Grader) -> dict[str, Any]:
    """Fill every quota with gated tasks, record the demonstrations and write the task set.

    Returns:
        The numbers of the datasheet.

    Raises:
        UserError: the directory holds something else.
        SynthesisError: the gates reject too much, or the contamination scan finds something.
        SandboxError: the infrastructure keeps failing; the same command goes on later.
    """
    started = time.monotonic()
    out = Path(run.out)
    wanted = quotas(run)
    synthesis = Synthesis(run, sandboxes, grader)
    try:
        tasks = synthesis.admit(wanted)
        demonstrations = synthesis.demonstrate(tasks)
    finally:
        synthesis.journal.close()
    trajectories = [
        Trajectory(candidate=candidate, turns=report.turns, reward=report.oracle_reward)
        for candidate in sorted(tasks, key=lambda candidate: candidate.id)
        if (report := synthesis.reports.get(candidate.id))
    ]
    transcripts = write_transcripts(out, trajectories, demonstrations)
    refuse_leaks(out, tasks, [path for name, path in transcripts.items() if name != "heldout"])
    sheet = datasheet(
        settings=settings(run),
        cells=[candidate.cell for candidate in tasks],
        reports=list(synthesis.reports.values()),
        num_duplicates=synthesis.proposer.num_duplicates,
        num_demonstrations=len(demonstrations),
        num_resumed=synthesis.num_resumed,
        sandbox=sandboxes.kind.name,
        seconds=time.monotonic() - started,
    )
    write_index(out, tasks, sheet, run.seed)
    return sheet


class Synthesis:
    """One run: what it proposed, and what the journal says became of it."""

    def __init__(self, run: SynthRun, sandboxes: SandboxFactory, grader: Grader) -> None:
        self.run = run
        self.out = Path(run.out)
        self.sandboxes = sandboxes
        self.run_id = f"synth-{self.out.name}"
        self.gates = Gates(sandboxes, grader, self.run_id)
        self.proposer = Proposer(run.seed, run.num_words)
        self.journal = _open_journal(run)
        records = self.journal.records[1:]
        self.reports = {r["task_id"]: GateReport.from_json(r) for r in records if "task_id" in r}
        self._recorded: dict[int, list[Any]] = {r["block"]: r["demonstrations"] for r in records if "block" in r}
        self.num_resumed = len(self.reports)

    def admit(self, wanted: dict[Cell, int]) -> list[Candidate]:
        """Candidates that pass the gates, as many as wanted; rejected ones are replaced, in rounds."""
        admitted: list[Candidate] = []
        for _ in range(MAX_ROUNDS):
            filled = Counter(candidate.cell for candidate in admitted)
            batch = [self.proposer.propose(cell) for cell, quota in wanted.items() for _ in range(quota - filled[cell])]
            if not batch:
                return admitted
            self._write(batch)
            if self.run.gates:
                self._gate([candidate for candidate in batch if candidate.id not in self.reports])
            for candidate in batch:
                report = self.reports.get(candidate.id)
                if report is None or report.accepted:
                    admitted.append(candidate)
                else:
                    logger.warning("%s was rejected by %s", candidate.id, report.reason)
                    shutil.rmtree(self.out / candidate.id, ignore_errors=True)
        last = next((report.reason for report in reversed(self.reports.values()) if not report.accepted), "")
        raise SynthesisError(f"{MAX_ROUNDS} rounds of candidates did not fill the quotas; the last rejection: {last}")

    def _write(self, batch: Sequence[Candidate]) -> None:
        """Write the candidates' folders; the journal's reports must be about these very bytes."""
        for candidate in batch:
            task = load_task(write_task(candidate.spec, candidate.id, self.out))
            report = self.reports.get(candidate.id)
            if report and report.content_hash != task.content_hash:
                raise UserError(
                    f"{self.out}: {candidate.id} was gated with other content; remove the directory and start again"
                )

    def _gate(self, batch: Sequence[Candidate]) -> None:
        jobs = [
            lambda candidate=candidate: self.gates.check(load_task(self.out / candidate.id), candidate.spec.turns)
            for candidate in batch
        ]
        # each report is in the journal before it counts
        for report in in_parallel("Gating candidates", jobs, self.run.workers):
            self.journal.append(report.to_json())
            self.reports[report.task_id] = report

    def demonstrate(self, tasks: Sequence[Candidate]) -> list[Trajectory]:
        """Oracle trajectories of further training candidates, in blocks that share a sandbox and a journal record."""
        cells = spread(self.run, DEMONSTRATION, self.run.num_demonstrations)
        candidates = [self.proposer.propose(cell) for cell, quota in cells.items() for _ in range(quota)]
        size = DEMONSTRATIONS_PER_SANDBOX
        blocks = [candidates[start : start + size] for start in range(0, len(candidates), size)]

        def job(number: int) -> tuple[int, list[Any]]:
            task = load_task(self.out / tasks[0].id)
            attempt_id = f"demonstrations-{number}"
            found = demonstrate_all(blocks[number], task, self.sandboxes, self.run_id, attempt_id)
            return number, [turns and [turn.to_json() for turn in turns] for turns in found]

        missing = [number for number in range(len(blocks)) if number not in self._recorded]
        jobs = [lambda number=number: job(number) for number in missing]
        for number, found in in_parallel(f"Recording demonstrations, {size} at a time", jobs, self.run.workers):
            self.journal.append({"block": number, "demonstrations": found})
            self._recorded[number] = found
        return [
            Trajectory(candidate=candidate, turns=[RecordedTurn(**turn) for turn in turns], reward=None)
            for number, block in enumerate(blocks)
            for candidate, turns in zip(block, self._recorded[number], strict=True)
            if turns is not None
        ]


def in_parallel(title: str, jobs: Sequence[Callable[[], T]], workers: int) -> Iterator[T]:
    """Results as they come, with progress shown; on an error or Ctrl-C, jobs that have not begun never begin."""
    if not jobs:
        return
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="synth")
    try:
        futures = [pool.submit(job) for job in jobs]
        with ProgressLine(title, len(futures)) as progress:
            for future in as_completed(futures):
                yield future.result()
                progress.advance()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


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


def refuse_leaks(out: Path, tasks: Sequence[Candidate], transcripts: Sequence[Path]) -> None:
    """Raises SynthesisError when a piece of a held-out task stands in a training task or a training transcript."""
    folders = {split: [out / task.id for task in tasks if task.cell.split == split] for split in SPLITS}
    if leaks := scan_contamination([*folders["train"], *transcripts], folders["heldout"]):
        first = leaks[0]
        raise SynthesisError(
            f"{len(leaks)} pieces of held-out tasks occur in training tasks; the first: the {first.kind} "
            f"{first.text!r} of {first.heldout_id} in {first.train_id}"
        )
