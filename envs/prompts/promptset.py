"""A prompt set: prompts of a file as the tasks of a task set, so that order, ledger, groups and lineage are the same.

A prompt is a task without a folder and without a machine: one turn answers it, and what was said is the one artifact.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from burnish.envs.prompts.columns import Fields, Question, read_fields
from burnish.envs.prompts.config import PromptData
from burnish.envs.prompts.records import PromptError, read_records
from burnish.envs.sandbox.base import ArtifactFile, Artifacts
from burnish.envs.task import Task, TaskConfig
from burnish.envs.taskset import TaskSet, content_hash_of

logger = logging.getLogger(__name__)

TRAIN, HELDOUT = "train", "heldout"
COMPLETION = "/completion.txt"


@dataclass(frozen=True, kw_only=True)
class Prompt(Task):
    """One record of a prompt file."""

    question: Question
    """As the policy is asked, in the form the file has: text or chat messages."""
    answer: Any = None
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict, repr=False)
    columns: dict[str, Any] = field(default_factory=dict, repr=False)
    """Every column of the record but the prompt's."""
    place: str
    """File and line or row."""

    @property
    def where(self) -> str:
        return self.place

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat messages that open the episode."""
        return [{"role": "user", "content": self.question}] if isinstance(self.question, str) else self.question

    def solution_lines(self) -> list[str]:
        """What the oracle says: the answer.

        Raises:
            PromptError: there is none, or it is not something to say.
        """
        if not isinstance(self.answer, str | int | float) or isinstance(self.answer, bool):
            raise PromptError(f"{self.place}: no answer that the oracle could say; data.columns.answer names a column")
        return [str(self.answer)]


def completion_artifacts(completion: str) -> Artifacts:
    """What an episode without a machine leaves to be graded."""
    content = completion.encode("utf-8", "surrogatepass")
    return Artifacts(files=(ArtifactFile(path=COMPLETION, content=content),))


def completion_of(artifacts: Artifacts) -> str:
    """The text in `completion_artifacts`; empty where there is none."""
    file = artifacts.file(COMPLETION)
    return "" if file is None else file.content.decode("utf-8", "surrogatepass")


def load_prompts(data: PromptData) -> TaskSet:
    """Reads a whole prompt set; splits `train` and, where something is held out, `heldout`.

    Raises:
        PromptError: the first record that is not what the format says, or a split without a prompt.
    """
    prompts = _read(Path(data.path), "prompt", data)
    splits = {TRAIN: prompts}
    if data.heldout_path:
        splits[HELDOUT] = _read(Path(data.heldout_path), HELDOUT, data)
        _warn_of_shared(splits)
    elif data.heldout_fraction:
        splits = {TRAIN: [], HELDOUT: []}
        for prompt in prompts:
            splits[HELDOUT if is_held_out(prompt.question, data.heldout_fraction) else TRAIN].append(prompt)
        if empty := [name for name, chosen in splits.items() if not chosen]:
            raise PromptError(
                f"{data.path}: data.heldout_fraction={data.heldout_fraction:g} of {len(prompts)} prompts leaves none for "
                f"{empty[0]}"
            )
    tasks = tuple(sorted((prompt for chosen in splits.values() for prompt in chosen), key=lambda prompt: prompt.id))
    ids = {name: tuple(prompt.id for prompt in chosen) for name, chosen in splits.items()}
    return TaskSet(path=Path(data.path), tasks=tasks, splits=ids, content_hash=content_hash_of(tasks, ids))


def is_held_out(question: Question, fraction: float) -> bool:
    """The same answer for the same prompt, wherever it stands."""
    return int.from_bytes(_digest(question)[:8], "big") < fraction * 2**64


def _read(path: Path, name: str, data: PromptData) -> list[Prompt]:
    """A file's prompts; the line or row is part of the id, so that equal prompts stay two."""
    prompts = [
        _prompt(f"{name}-{number:06d}", path, where, read_fields(record, where, data), data)
        for where, number, record in read_records(path)
    ]
    if not prompts:
        raise PromptError(f"{path}: no prompt in it")
    return prompts


def _prompt(prompt_id: str, path: Path, where: str, fields: Fields, data: PromptData) -> Prompt:
    question = _asked(fields.question, where, data)
    content = [question, fields.answer, fields.data_source, fields.extra, fields.columns, list(data.reward_range)]
    return Prompt(
        id=prompt_id,
        path=path,
        instruction=question if isinstance(question, str) else question[-1]["content"],
        config=TaskConfig(
            reward_range=(data.reward_range[0], data.reward_range[1]), metadata={"family": fields.data_source}
        ),
        content_hash=_digest(content).hex(),
        question=question,
        answer=fields.answer,
        data_source=fields.data_source,
        extra=fields.extra,
        columns=fields.columns,
        place=where,
    )


def _asked(question: Question, where: str, data: PromptData) -> Question:
    """With data.suffix behind it and data.system before it."""
    if isinstance(question, str):
        text = question + data.suffix
        system = [{"role": "system", "content": data.system}] if data.system else []
        return [*system, {"role": "user", "content": text}] if system else text
    if data.system and question[0]["role"] in ("system", "developer"):
        raise PromptError(f"{where}: data.system is given, but the prompts bring a system message of their own")
    before = [{"role": "system", "content": data.system}] if data.system else []
    return [*before, *question[:-1], {"role": "user", "content": question[-1]["content"] + data.suffix}]


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def _warn_of_shared(splits: dict[str, list[Prompt]]) -> None:
    places: dict[bytes, str] = {_digest(prompt.question): prompt.place for prompt in splits[TRAIN]}
    shared: Sequence[Prompt] = [prompt for prompt in splits[HELDOUT] if _digest(prompt.question) in places]
    if shared:
        logger.warning(
            "%d of %d held-out prompts are trained on too, the first: %s is %s",
            len(shared), len(splits[HELDOUT]), shared[0].place, places[_digest(shared[0].question)],
        )  # fmt: skip
