"""A task set: a directory with one folder a task, and `taskset.json` with splits and the datasheet when synthesis made it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from burnish.envs.task import Task, TaskError, load_task

INDEX = "taskset.json"


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """Checked tasks, sorted by id."""

    path: Path
    tasks: tuple[Task, ...]
    splits: Mapping[str, tuple[str, ...]]
    """Split name -> task ids; a set without taskset.json has the one split `all`."""
    content_hash: str
    """sha256 over the tasks' ids and hashes and the splits: names the set in manifests and tables."""
    index: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """taskset.json as read: families, difficulty, datasheet, seed, version."""

    def split(self, name: str) -> tuple[Task, ...]:
        """Tasks of one split, in the order the split lists them.

        Raises:
            TaskError: no such split.
        """
        if name not in self.splits:
            raise TaskError(f"{self.path}: no split {name!r}; it has {', '.join(sorted(self.splits))}")
        by_id = {task.id: task for task in self.tasks}
        return tuple(by_id[task_id] for task_id in self.splits[name])

    def __len__(self) -> int:
        return len(self.tasks)


def load_taskset(directory: Path) -> TaskSet:
    """Loads and checks every task below `directory`.

    Raises:
        TaskError: no such directory, no task in it, a broken task, or splits that do not fit the tasks.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise TaskError(f"{directory}: no such task set")
    if (directory / "task.toml").exists():
        raise TaskError(f"{directory}: this is a single task; give the folder that holds it")
    folders = sorted(entry for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    tasks = tuple(load_task(folder) for folder in folders)
    if not tasks:
        raise TaskError(f"{directory}: no task folder in it")
    seen: dict[str, str] = {}
    for task in tasks:
        other = seen.setdefault(task.id.casefold(), task.id)
        if other != task.id:
            raise TaskError(f"{directory}: {other} and {task.id} differ in case only")
    index = read_index(directory / INDEX)
    splits = read_splits(directory / INDEX, index, tasks)
    return TaskSet(path=directory, tasks=tasks, splits=splits, content_hash=content_hash_of(tasks, splits), index=index)


def content_hash_of(tasks: Sequence[Task], splits: Mapping[str, tuple[str, ...]]) -> str:
    """sha256 (hex) that names a task set in manifests."""
    listing = [[task.id, task.content_hash] for task in tasks]
    return sha256(json.dumps([listing, sorted(splits.items())]).encode()).hexdigest()


def read_index(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        index = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: not JSON: {error}") from None
    if not isinstance(index, dict):
        raise TaskError(f"{path}: must hold an object")
    return index


def read_splits(path: Path, index: Mapping[str, Any], tasks: tuple[Task, ...]) -> dict[str, tuple[str, ...]]:
    known = dict.fromkeys(task.id for task in tasks)
    if not index:
        return {"all": tuple(known)}
    splits = index.get("splits")
    if not isinstance(splits, dict) or not splits:
        raise TaskError(f"{path}: `splits` must map split names to lists of task ids")
    owner: dict[str, str] = {}
    for name, ids in splits.items():
        if not isinstance(ids, list) or not all(isinstance(task_id, str) for task_id in ids):
            raise TaskError(f"{path}: splits.{name} must be a list of task ids")
        for task_id in ids:
            if task_id not in known:
                raise TaskError(f"{path}: splits.{name} names {task_id!r}, which is no task of the set")
            if task_id in owner:
                raise TaskError(f"{path}: {task_id!r} is in split {owner[task_id]} and again in {name}")
            owner[task_id] = name
    if unlisted := [task_id for task_id in known if task_id not in owner]:
        raise TaskError(f"{path}: task {unlisted[0]!r} is in no split")
    return {name: tuple(ids) for name, ids in splits.items()}
