"""What `burnish rl resume=RUN` finds where a run should be, and says when it is none or damaged."""

import json

import pytest

from burnish.configs.schema import to_yaml
from burnish.envs.errors import UserError
from burnish.rollout.config import RlRun
from burnish.rollout.run_folder import Parent, claim, read_run


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(RlRun(tasks="tasks", policy=str(tmp_path / "policy"), name="run")))
    manifest = {"stage": "rl", "parents": {"policy": "0", "tasks": "1"}, "finished": False}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_settings_come_back_from_wherever_the_folder_is_now(run):
    read = read_run(RlRun(resume=str(run)), "rl")
    assert (read.tasks, read.name, read.runs) == ("tasks", "run", str(run.parent))


@pytest.mark.parametrize(
    "content",
    [b"", b"[", b"a: b: c", b"[1, 2]", b"\xff\xfe", b"max_stps: 3\n", b"max_steps: many\n", b"max_steps: 0\n", b"{}}"],
)
def test_damaged_settings_are_named(run, content):
    (run / "config.yaml").write_bytes(content)
    if not content:
        assert read_run(RlRun(resume=str(run)), "rl").tasks == ""
        return
    with pytest.raises(UserError, match=r"config.yaml: not settings of `burnish rl` that this version reads"):
        read_run(RlRun(resume=str(run)), "rl")


def test_no_run_and_further_keys_are_named(run, tmp_path):
    with pytest.raises(UserError, match="no run of `burnish rl` there"):
        read_run(RlRun(resume=str(tmp_path / "elsewhere")), "rl")
    with pytest.raises(UserError, match="give no other key"):
        read_run(RlRun(resume=str(run), max_steps=9), "rl")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff"])
def test_a_damaged_manifest_is_named(run, content):
    (run / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest.json: .*take the run's folder from a copy, or start again"):
        claim(run, stage="rl", parents={}, settings="", is_resumed=True)


def test_a_folder_that_is_taken_is_not_started_again(run):
    with pytest.raises(UserError, match="holds a run: go on with"):
        claim(run, stage="rl", parents={}, settings="", is_resumed=False)


def test_a_parent_that_changed_is_named(run):
    parents = {"policy": Parent(hash="0", path="policy"), "tasks": Parent(hash="2", path="the/tasks")}
    with pytest.raises(UserError, match=r"the/tasks has changed since .*: tasks has another hash"):
        claim(run, stage="rl", parents=parents, settings="", is_resumed=True)
