"""The scan finds every piece of a held-out task that is planted in a training task, and nothing where nothing is."""

import random

import pytest

from burnish.envs.synthesis.contamination import needles, scan_contamination
from burnish.envs.synthesis.generate import FAMILIES, generate
from burnish.envs.synthesis.write import task_id, write_task


def write_split(split, parent, difficulty=2):
    parent.mkdir()
    specs = [generate(family, difficulty, random.Random(f"{split}{family}"), split=split) for family in FAMILIES]
    return [write_task(spec, task_id(spec, index), parent) for index, spec in enumerate(specs)]


@pytest.fixture
def splits(tmp_path):
    return {split: write_split(split, tmp_path / split) for split in ("train", "heldout")}


def test_generated_splits_share_nothing(splits):
    assert scan_contamination(splits["train"], splits["heldout"]) == []


def test_a_split_scanned_against_itself_leaks_everything(splits):
    leaks = scan_contamination(splits["train"], splits["train"])
    assert {leak.heldout_id for leak in leaks} == {path.name for path in splits["train"]}
    assert {leak.kind for leak in leaks} == {"command", "answer", "name"}


@pytest.mark.parametrize("kind", ["command", "answer", "name"])
@pytest.mark.parametrize(
    "hidden_in", ["instruction.md", "environment/files/seen.txt", "solution/solve.sh", "tests/expected.json"]
)
def test_a_planted_leak_is_found(splits, kind, hidden_in):
    leaked_from, leaked_into = splits["heldout"][-1], splits["train"][3]
    text = next(text for text, found in needles(leaked_from).items() if found == kind)
    path = leaked_into / hidden_in
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + f"# see {text} there\n")
    leaks = scan_contamination(splits["train"], splits["heldout"])
    assert (leaked_from.name, leaked_into.name, kind, text) in {
        (leak.heldout_id, leak.train_id, leak.kind, leak.text) for leak in leaks
    }
    assert {leak.train_id for leak in leaks} == {leaked_into.name}


def test_the_training_tasks_ids_are_scanned_too(splits):
    name = next(text for text, kind in needles(splits["heldout"][0]).items() if kind == "name")
    renamed = splits["train"][0].rename(splits["train"][0].with_name(f"write-line-{name}-0000"))
    (leak,) = scan_contamination([renamed], [splits["heldout"][0]])
    assert leak.text == name
