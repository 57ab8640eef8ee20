"""What a finished task set holds beside the task folders: transcripts, datasheet and, last of all, taskset.json."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.envs.synthesis.datasheet import render
from burnish.envs.synthesis.propose import Candidate
from burnish.envs.synthesis.transcript import RecordedTurn, messages
from burnish.envs.synthesis.words import SPLITS

INDEX_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What the oracle did on a candidate."""

    candidate: Candidate
    turns: Sequence[RecordedTurn]
    reward: float | None
    """From the hidden tests; None for a demonstration, which has none."""


DEMONSTRATIONS = "demonstrations.jsonl"


def write_transcripts(
    out: Path, trajectories: Sequence[Trajectory], demonstrations: Sequence[Trajectory]
) -> dict[str, Path]:
    """`oracle-<split>.jsonl` of the tasks and, where there are any, `demonstrations.jsonl`; one trajectory a line.

    They are apart because RL learns nothing from a task whose solution SFT has taught: train on the demonstrations,
    and keep the tasks for RL.

    Returns:
        The files by split, and `demonstrations`.
    """
    groups = {
        split: (out / f"oracle-{split}.jsonl", [t for t in trajectories if t.candidate.cell.split == split])
        for split in SPLITS
    }
    if demonstrations:
        groups["demonstrations"] = (out / DEMONSTRATIONS, list(demonstrations))
    for path, own in groups.values():
        write_atomically(path, "".join(json.dumps(_record(trajectory)) + "\n" for trajectory in own))
    return {name: path for name, (path, _) in groups.items()}


def _record(trajectory: Trajectory) -> dict[str, Any]:
    """As sft reads it, with the raw turns beside the messages."""
    candidate = trajectory.candidate
    return {
        "task_id": candidate.id,
        "domain": candidate.spec.domain,
        "family": candidate.cell.family,
        "difficulty": candidate.cell.difficulty,
        "split": candidate.cell.split,
        "reward": trajectory.reward,
        "turns": [turn.to_json() for turn in trajectory.turns],
        "messages": messages(candidate.spec.instruction, trajectory.turns),
    }


def write_index(out: Path, tasks: Sequence[Candidate], sheet: dict[str, Any], seed: int) -> None:
    """DATASHEET.md, then taskset.json on a disk that holds all the rest."""
    write_atomically(out / "DATASHEET.md", render(sheet))
    os.sync()
    in_order = sorted(tasks, key=lambda candidate: candidate.id)
    index = {
        "version": INDEX_VERSION,
        "seed": seed,
        "splits": {
            split: [candidate.id for candidate in in_order if candidate.cell.split == split] for split in SPLITS
        },
        "tasks": {
            candidate.id: {
                "domain": candidate.spec.domain,
                "family": candidate.cell.family,
                "difficulty": candidate.cell.difficulty,
            }
            for candidate in in_order
        },
        "datasheet": sheet,
    }
    write_atomically(out / "taskset.json", json.dumps(index, indent=1) + "\n")


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
