"""Task sets: sorted, hashed, and split by an index that must fit the tasks."""

import json

import pytest

from burnish.envs.task import TaskError
from burnish.envs.taskset import load_taskset


def write_index(make_task, names, index):
    for name in names:
        folder = make_task(name).parent
    (folder / "taskset.json").write_text(json.dumps(index))
    return folder


def test_tasks_come_sorted_and_split(make_task):
    folder = write_index(make_task, "cab", {"splits": {"train": ["c", "a"], "heldout": ["b"]}, "seed": 3})
    tasks = load_taskset(folder)
    assert [task.id for task in tasks.tasks] == ["a", "b", "c"]
    assert [task.id for task in tasks.split("train")] == ["c", "a"]
    assert tasks.index["seed"] == 3
    with pytest.raises(TaskError, match="no split 'test'; it has heldout, train"):
        tasks.split("test")


def test_without_an_index_all_tasks_are_one_split(make_task):
    folder = make_task("x").parent
    assert [task.id for task in load_taskset(folder).split("all")] == ["x"]


def test_the_hash_names_content_and_splits(make_task):
    folder = write_index(make_task, "ab", {"splits": {"train": ["a"], "heldout": ["b"]}})
    first = load_taskset(folder).content_hash
    assert load_taskset(folder).content_hash == first
    (folder / "taskset.json").write_text(json.dumps({"splits": {"train": ["b"], "heldout": ["a"]}}))
    second = load_taskset(folder).content_hash
    (folder / "a" / "instruction.md").write_text("other")
    assert len({first, second, load_taskset(folder).content_hash}) == 3


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"splits": {"train": ["a", "zz"]}}, "splits.train names 'zz'"),
        ({"splits": {"train": ["a", "b"], "heldout": ["b"]}}, "'b' is in split train and again in heldout"),
        ({"splits": {"train": ["a"]}}, "task 'b' is in no split"),
        ({"splits": {"train": "a"}}, "splits.train must be a list"),
        ({"seed": 1}, "`splits` must map"),
        ([1], "must hold an object"),
    ],
)
def test_splits_that_do_not_fit_are_refused(make_task, index, expected):
    folder = write_index(make_task, "ab", index)
    with pytest.raises(TaskError, match=expected):
        load_taskset(folder)


def test_what_is_no_task_set_is_refused(make_task, tmp_path):
    task = make_task("a")
    with pytest.raises(TaskError, match="single task"):
        load_taskset(task)
    with pytest.raises(TaskError, match="no such task set"):
        load_taskset(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="no task folder"):
        load_taskset(tmp_path / "empty")
    make_task("A")
    with pytest.raises(TaskError, match="differ in case only"):
        load_taskset(task.parent)
    (task / "task.toml").write_text("x = 1")
    with pytest.raises(TaskError, match=r"a/task\.toml: unknown key x"):
        load_taskset(task.parent)
