"""Does anything that a held-out task asks a policy to produce stand anywhere in a training task?

Works on written task folders, so that it can be repeated on any task set, by whoever doubts it. The needles of a
held-out task are its oracle commands, every line, path and function that its hidden tests want and its initial files
lack, and every compound name in its text. The hay is every byte of every file of the training tasks, their ids included.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from burnish.envs.synthesis.words import COMPOUND
from burnish.envs.task import load_task

# a separator that no needle holds, so that a match never spans two files
_SEAM = "\x00"


@dataclass(frozen=True, kw_only=True)
class Leak:
    """A piece of a held-out task found in a training task."""

    heldout_id: str
    train_id: str
    kind: str
    """`command`, `answer` or `name`."""
    text: str


def _text_files(root: Path) -> dict[str, str]:
    if root.is_file():
        return {root.name: root.read_bytes().decode(errors="replace")}
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes().decode(errors="replace") for path in files}


def needles(task_dir: Path) -> dict[str, str]:
    """What must stay unseen of one held-out task: text -> kind."""
    files = _text_files(task_dir)
    initial = "\n".join(text for name, text in files.items() if name.startswith("environment/files/"))
    given = set(initial.splitlines()) | {
        name.removeprefix("environment/files/") for name in files if name.startswith("environment/files/")
    }
    found = dict.fromkeys(
        COMPOUND.findall("\n".join([files["instruction.md"], files["solution/solve.sh"], initial])), "name"
    )
    wanted = json.loads(files["tests/expected.json"])["files"]
    answers = {*wanted, *(line for text in wanted.values() for line in text.splitlines())} - given
    if "tests/functions.json" in files:
        called = json.loads(files["tests/functions.json"])["functions"]
        names = {name for test in called for name in (test["name"], f"{test['module']}.py")}
        answers |= {name for name in names if name not in initial and name not in given}
    found |= dict.fromkeys(sorted(answers), "answer")
    return found | dict.fromkeys(load_task(task_dir).solution_lines(), "command")


def scan_contamination(train: Iterable[Path], heldout: Iterable[Path]) -> list[Leak]:
    """Every piece of a held-out task that stands in a training task.

    Args:
        train: folders of the training tasks, and single files that a policy is trained on as well.
        heldout: folders of the held-out tasks.

    Returns:
        One leak per (held-out task, piece, training task), in the order of the arguments.
    """
    hay = {path.name: _SEAM.join([path.name, *_text_files(path).values()]) for path in train}
    everything = _SEAM.join(hay.values())
    return [
        Leak(heldout_id=path.name, train_id=train_id, kind=kind, text=text)
        for path in heldout
        for text, kind in needles(path).items()
        if text in everything
        for train_id, content in hay.items()
        if text in content
    ]
