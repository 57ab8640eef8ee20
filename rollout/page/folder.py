"""What of a run lies in a folder: its own files, and the folders of its stages. Reads names and small files only."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from burnish.envs.errors import UserError

MAX_DEPTH = 3
# folders that hold thousands of files and no stage
PASSED_BY = {"blocks", "checkpoints", "weights", "wandb", "report", "policy"}
LOCKS = ("ledger.sqlite.lock", ".lock", "stages/lock")


@dataclass(frozen=True)
class Part:
    """A folder that trains, evaluates, or runs a pipeline."""

    path: Path
    name: str
    """As the page calls it: its path below the run."""

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """manifest.json of a stage; empty where there is none, or another program's."""
        found = read_json(self.path / "manifest.json")
        return found if "stage" in found and isinstance(found.get("parents"), dict) else {}

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """conditions.json of an evaluation, else empty."""
        found = read_json(self.path / "conditions.json")
        return found if "task_set" in found else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json of an evaluation that has ended, else empty."""
        found = read_json(self.path / "summary.json")
        return found if isinstance(found.get("domains"), dict) else {}

    @property
    def is_evaluation(self) -> bool:
        return bool(self.conditions or self.summary) and self.has("results.jsonl")

    @property
    def is_training(self) -> bool:
        return self.has("ledger.sqlite") or bool(self.manifest) or has_metrics(self.path / "metrics.jsonl")

    @property
    def is_pipeline(self) -> bool:
        """Stages run one after the other below it."""
        return self.has("stages/attempts.jsonl") or isinstance(self.totals.get("stages"), dict)

    @cached_property
    def totals(self) -> dict[str, Any]:
        """report/summary.json of a pipeline that has ended, else empty."""
        return read_json(self.path / "report" / "summary.json")

    @property
    def is_run(self) -> bool:
        return self.is_evaluation or self.is_training or self.is_pipeline

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    @property
    def state(self) -> str:
        """finished, going on, or neither."""
        if any(is_locked(self.path / lock) for lock in LOCKS):
            return "going on"
        if self.manifest.get("finished") or self.summary or (self.is_pipeline and self.totals):
            return "finished"
        return "not finished: stopped, or killed"


def parts_of(run: Path) -> list[Part]:
    """The run itself first, then its stages, in order of name.

    Raises:
        UserError: the folder is no run; says what it is instead where that can be told.
    """
    if not run.is_dir():
        raise UserError(f"no folder of a run at {run}")
    own = Part(run, run.resolve().name)
    below = list(_below(run, run, MAX_DEPTH))
    if own.is_run:
        return [own, *below]
    if below:
        names = ", ".join(str(run / part.name) for part in below[:3])
        raise UserError(f"{run} is no run itself, but holds {len(below)} folders of runs: give one, such as {names}")
    raise UserError(
        f"{run} holds nothing of a run: no ledger.sqlite, metrics.jsonl, manifest.json of a stage, results.jsonl or stages/"
    )


def _below(run: Path, folder: Path, depth: int) -> Iterator[Part]:
    for path in sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()):
        is_tasks = (path / "taskset.json").exists() or (path / ".synth-journal.jsonl").exists()
        if path.name in PASSED_BY or path.name.startswith(".") or is_tasks:
            continue
        part = Part(path, path.relative_to(run).as_posix())
        if part.is_run:
            yield part
        if depth > 1:
            yield from _below(run, path, depth - 1)


def order_of(run: Part) -> dict[str, int]:
    """Stage -> place, as the pipeline started them first; empty where no pipeline ran."""
    order: dict[str, int] = {}
    for record in read_lines(run.path / "stages" / "attempts.jsonl"):
        order.setdefault(str(record.get("stage")), len(order))
    return order


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON lines file, what a kill tore or anything else damaged left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def has_metrics(path: Path) -> bool:
    """Its first line is one of ours; other programs call their files like this too."""
    try:
        with path.open("rb") as file:
            return b'"crc": "' in file.readline(1 << 20)
    except OSError:
        return False


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock, told without touching it."""
    try:
        number = path.stat().st_ino
        held = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(f":{number} " in line and "FLOCK" in line for line in held)
