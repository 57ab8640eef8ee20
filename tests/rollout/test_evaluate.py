"""burnish eval on real tasks in the local sandbox: oracle, nothing, resumption, and what a user gets wrong."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest

from burnish.envs.config import Domain, SandboxConfig, SandboxKind, SynthRun
from burnish.envs.errors import UserError
from burnish.envs.synthesis.pipeline import main as synthesise
from burnish.policy.checkpoint.folder_lock import held
from burnish.rollout.config import Agent, EvalRun
from burnish.rollout.evaluate import CONDITIONS, RESULTS, SUMMARY, append, main, open_log
from burnish.rollout.stats import read_results


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("eval") / "tasks"
    synthesise(SynthRun(out=str(out), num_train=2, num_heldout=4, gates=False, sandbox=SandboxKind.local))
    return out


def evaluate(tasks: Path, out: Path, **changes) -> dict:
    run = EvalRun(
        **{"tasks": str(tasks), "agent": Agent.oracle, "out": str(out), "sandbox": SandboxKind.local} | changes
    )
    assert main(run) == 0
    return json.loads((out / SUMMARY).read_text())


def test_the_oracle_solves_every_task_and_doing_nothing_solves_none(tasks, tmp_path):
    oracle = evaluate(tasks, tmp_path / "oracle")
    assert oracle["all"] == {"pass": 1.0, "n": 4, "lo": pytest.approx(0.5101, abs=1e-4), "hi": 1.0}
    assert oracle["domains"]["terminal"] == oracle["all"]
    assert oracle["ungraded"] == 0
    nop = evaluate(tasks, tmp_path / "nop", agent=Agent.nop, samples=2)
    assert (nop["all"]["pass"], nop["all"]["n"]) == (0.0, 4), "samples of one task are no independent tasks"
    rows = read_results(tmp_path / "nop" / RESULTS)
    assert len(rows) == 8
    assert {row["outcome"] for row in rows} == {"finished"}
    assert rows[0].keys() >= {"task", "domain", "family", "passed", "reward", "outcome", "turns", "tokens"}


def test_the_domain_comes_from_the_tasks(tmp_path):
    tasks = tmp_path / "tasks"
    run = SynthRun(out=str(tasks), num_train=2, num_heldout=3, gates=False, sandbox=SandboxKind.local)
    run.domain = Domain.coding
    synthesise(run)
    oracle = evaluate(tasks, tmp_path / "oracle")
    assert oracle["domains"] == {"coding": oracle["all"]}
    assert (oracle["all"]["pass"], oracle["all"]["n"]) == (1.0, 3)
    nop = evaluate(tasks, tmp_path / "nop", agent=Agent.nop)
    assert nop["domains"]["coding"]["pass"] == 0.0


def test_the_summary_carries_its_conditions(tasks, tmp_path):
    summary = evaluate(tasks, tmp_path / "out", stage="base", limit=1)
    conditions = summary["conditions"]
    assert (summary["stage"], summary["harness"], summary["samples"]) == ("base", "bash", 1)
    assert conditions["split"] == "heldout"
    assert len(conditions["task_set"]) == 64
    assert conditions.keys() >= {"sampling", "effort", "verifier", "episode", "seed"}


def test_an_interrupted_evaluation_goes_on_and_repeats_nothing(tasks, tmp_path):
    out = tmp_path / "out"
    whole = evaluate(tasks, out)
    lines = (out / RESULTS).read_text().splitlines(keepends=True)
    (out / RESULTS).write_text("".join(lines[:2]) + lines[2][:20])
    (out / SUMMARY).unlink()
    before = read_results(out / RESULTS)
    assert evaluate(tasks, out)["all"] == whole["all"]
    rows = read_results(out / RESULTS)
    assert rows[:2] == before
    assert len({row["task"] for row in rows}) == len(rows) == 4


def test_another_evaluation_in_the_same_folder_is_refused(tasks, tmp_path):
    evaluate(tasks, tmp_path / "out", limit=1)
    with pytest.raises(UserError, match=r"holds an evaluation with seed=0, this one has 7.*out=DIR"):
        evaluate(tasks, tmp_path / "out", limit=1, seed=7)


def test_a_broken_task_folder_is_named(tasks, tmp_path):
    broken = tmp_path / "tasks"
    shutil.copytree(tasks, broken)
    victim = sorted(path for path in broken.iterdir() if path.is_dir())[1]
    text = (victim / "task.toml").read_text()
    (victim / "task.toml").write_text(text.replace("[agent]\n", "[agent]\ntimeout_secs = 3\n"))
    with pytest.raises(UserError, match=rf"{victim.name}/task.toml.*timeout_secs"):
        evaluate(broken, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"agent": Agent.policy}, "policy=DIR"),
        ({"policy": "somewhere"}, "leave policy out"),
        ({"samples": 0}, "samples must be >= 1"),
        ({"concurrency": 1000}, "engine.max_contexts"),
    ],
)
def test_a_contradiction_is_found_before_anything_runs(changes, named):
    with pytest.raises(ValueError, match=named):
        EvalRun(**{"tasks": "tasks", "agent": Agent.oracle} | changes)


def test_a_policy_that_is_none_is_named(tasks, tmp_path):
    with pytest.raises(UserError, match="not a policy folder"):
        evaluate(tasks, tmp_path / "out", agent=Agent.policy, policy=str(tmp_path))


def test_a_mistake_leaves_nothing_that_stands_in_the_way(tasks, tmp_path):
    """A broken task is mended and the same command given again."""
    broken = tmp_path / "tasks"
    shutil.copytree(tasks, broken)
    taskset = json.loads((broken / "taskset.json").read_text())
    script = broken / taskset["splits"]["heldout"][0] / "solution" / "solve.sh"
    right = script.read_text()
    for wrong in ("", "# nothing\n"):
        script.write_text(wrong)
        with pytest.raises(UserError, match=r"solution/solve.sh: no command in it"):
            evaluate(broken, tmp_path / "out")
    script.unlink()
    with pytest.raises(UserError, match=r"solution/solve.sh: the task has no oracle solution"):
        evaluate(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    script.write_text(right)
    with pytest.raises(UserError, match="sandbox=docker needs a Docker engine"):
        evaluate(
            broken, tmp_path / "out", sandbox=SandboxKind.docker, limits=SandboxConfig(engine_url="unix:///nowhere")
        )
    assert evaluate(broken, tmp_path / "out")["all"]["pass"] == 1.0


def test_an_empty_split_is_named(tasks, tmp_path):
    empty = tmp_path / "tasks"
    shutil.copytree(tasks, empty)
    taskset = json.loads((empty / "taskset.json").read_text())
    splits = taskset["splits"]
    taskset["splits"] = {"train": splits["train"] + splits["heldout"], "heldout": []}
    (empty / "taskset.json").write_text(json.dumps(taskset))
    with pytest.raises(UserError, match="split heldout holds no task"):
        evaluate(empty, tmp_path / "out")


def test_two_evaluations_never_share_a_folder(tasks, tmp_path):
    with held(tmp_path / "out"), pytest.raises(ValueError, match="out is being written by another process"):
        evaluate(tasks, tmp_path / "out")


def test_damaged_records_of_an_evaluation_are_named(tasks, tmp_path):
    evaluate(tasks, tmp_path / "out", limit=1)
    (tmp_path / "out" / CONDITIONS).write_text("{")
    with pytest.raises(ValueError, match=r"conditions.json: not JSON \(line 1.*give another out=DIR"):
        evaluate(tasks, tmp_path / "out", limit=1)
    (tmp_path / "out" / CONDITIONS).unlink()
    (tmp_path / "out" / RESULTS).write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"results.jsonl line 1: not JSON"):
        evaluate(tasks, tmp_path / "out", limit=1)


def test_a_line_that_the_disk_has_no_room_for_leaves_no_half(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = open_log(tmp_path / RESULTS)
    append(log, {"task": "a", "passed": True})
    size = (tmp_path / RESULTS).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            append(log, {"task": "b", "passed": True})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append(log, {"task": "b", "passed": False})
    os.close(log)
    assert [row["task"] for row in read_results(tmp_path / RESULTS)] == ["a", "b"]
