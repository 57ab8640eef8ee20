"""The pipeline end to end at its smallest size: killed in the middle, gone on with, reported, and not done twice."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.configs.pipeline import plan, stages_of
from burnish.configs.schema import compose, to_yaml
from burnish.configs.stages import BudgetError, History, Stage, alone, overrides_of, run_stage
from burnish.envs.errors import UserError

ENV = os.environ | {"OMP_NUM_THREADS": "1"}
DOMAINS = ["terminal", "coding"]
TWO = "domains=[terminal,coding]"
STAGES = [
    *(f"synth-{d}" for d in DOMAINS),
    "init",
    *(f"eval-base-{d}" for d in DOMAINS),
    "sft",
    *(f"eval-sft-{d}" for d in DOMAINS),
    *(f"rl-{d}" for d in DOMAINS),
    *(f"eval-rl-{d}" for d in DOMAINS),
    "distill",
    *(f"eval-distill-{d}" for d in DOMAINS),
]


def start(runs: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "burnish.configs.cli", "quickstart"]
    settings = ["experiment=smoke", "sandbox=docker", f"runs={runs}"]
    return subprocess.Popen(
        [*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen, timeout_s: float) -> str:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # handed on to the stage, which removes its containers
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.mark.docker
@pytest.mark.slow
def test_smoke_pipeline_survives_a_kill_and_reports(tmp_path):
    run = tmp_path / "smoke"
    first = start(tmp_path)
    deadline = time.monotonic() + 300
    while not list((run / "sft" / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        if first.poll() is not None:
            break  # SFT was over before it was seen: the second start still has the rest to do
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert not (run / "report").exists()

    output = finish(start(tmp_path), 600)
    assert "Stage synth-coding is done already" in output
    assert "Stage eval-base-coding is done already" in output
    summary = json.loads((run / "report" / "summary.json").read_text())
    assert list(summary) == ["stages", "gains", "containers", "episodes", "tokens_trained", "seconds"]
    assert list(summary["stages"]) == ["base", "sft", "rl", "distill"]
    assert list(summary["gains"]) == ["sft-base", "rl-sft", "distill-specialist"]
    for domains in summary["stages"].values():
        assert {d: set(r) for d, r in domains.items()} == {d: {"pass", "n", "lo", "hi"} for d in DOMAINS}
        assert [domains[d]["n"] for d in DOMAINS] == [6, 6]
    for domains in summary["gains"].values():
        assert {d: set(r) for d, r in domains.items()} == {d: {"mean", "lo", "hi"} for d in DOMAINS}
    # every graded episode has a container for the agent, and one of its own for the verifier unless it left what another did
    assert summary["episodes"] >= 4 * 2 * 6 + 2 * 8 + 16
    assert summary["containers"] > summary["episodes"]
    assert (run / "report" / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "| rl | terminal |" in (run / "report" / "table.md").read_text()
    taught = json.loads((run / "sft" / "manifest.json").read_text())
    for stage in ("rl-terminal", "rl-coding", "distill"):
        manifest = json.loads((run / stage / "manifest.json").read_text())
        assert (manifest["finished"], manifest["steps"]) == (True, 2)
        lineage = json.loads((run / stage / "policy" / "burnish.json").read_text())
        assert lineage["parents"]["policy"] == taught["policy"]
        audit = subprocess.run(
            [sys.executable, "-m", "burnish.configs.cli", "audit", str(run / stage)],
            capture_output=True, text=True, env=ENV,
        )  # fmt: skip
        assert audit.returncode == 0, audit.stdout + audit.stderr
    # one lineage: what a stage was made of is what another one made
    stages = json.loads((run / "manifest.json").read_text())["stages"]
    assert list(stages) == STAGES
    made = {path: digest for stage in stages.values() for path, digest in stage["output"].items()}
    for stage in stages.values():
        assert {path: made[path] for path in stage["parents"]} == stage["parents"]

    output = finish(start(tmp_path), 60)
    for stage in STAGES:
        assert f"Stage {stage} is done already" in output
    assert json.loads((run / "report" / "summary.json").read_text()) == summary


def test_each_stage_is_started_with_the_settings_it_was_composed_with(tmp_path):
    run = compose(
        "quickstart", [f"runs={tmp_path}", "seed=5", "sandbox=local", "sft.data.max_tokens=77", "name=odd,name", TWO]
    )
    stages = stages_of(run)
    assert [stage.name for stage in stages] == STAGES
    for stage in stages:
        assert compose(stage.verb, overrides_of(stage.config)) == stage.config
    by_name = {stage.name: stage for stage in stages}
    assert by_name["sft"].config.data.max_tokens == 77
    folder = tmp_path / "odd,name"
    assert by_name["rl-coding"].config.train.seed == 5
    assert by_name["eval-rl-coding"].config.policy == str(folder / "rl-coding" / "policy")
    assert by_name["synth-coding"].config.sandbox == "local"
    assert by_name["synth-coding"].config.domain == "coding"
    assert by_name["sft"].config.data.more == [str(folder / "tasks" / "coding" / "demonstrations.jsonl")]
    teachers = by_name["distill"].config.teachers
    assert {name: teacher.policy for name, teacher in teachers.items()} == {
        domain: str(folder / f"rl-{domain}" / "policy") for domain in DOMAINS
    }
    assert not by_name["rl-coding"].command()[-1].startswith("resume=")
    (folder / "rl-coding").mkdir(parents=True)
    (folder / "rl-coding" / "config.yaml").write_text(to_yaml(by_name["rl-coding"].config))
    assert by_name["rl-coding"].command()[-1].startswith("resume=")
    # `resume` would take the settings of the folder, and the new ones would silently not be used
    other = dataclasses.replace(by_name["rl-coding"].config, max_steps=21)
    with pytest.raises(UserError, match="started with other settings"):
        dataclasses.replace(by_name["rl-coding"], config=other).command()


def test_one_domain_needs_no_distillation():
    stages = [stage.name for stage in stages_of(compose("pipeline", ["domains=[coding]"]))]
    assert stages[0] == "synth-coding"
    assert stages[-1] == "eval-rl-coding"


def test_a_dry_run_says_what_is_left_to_do_and_what_it_may_use(tmp_path):
    shown = plan(compose("quickstart", [f"runs={tmp_path}", "budget.minutes=90", "budget.disk_gib=2", TWO]))
    assert [line.split()[1] for line in shown.splitlines()[1:-1]] == STAGES
    assert "budget 90 min; disk: budget 2 GiB" in shown.splitlines()[-1]
    assert "no budget" in plan(compose("quickstart", [f"runs={tmp_path}", "budget.minutes=0"]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["domains=[]"], "domains must name at least one domain"),
        (["domains=[coding,coding]"], "each once"),
        ([TWO, "synth.families=[juggle]"], "no domain of terminal, coding has a family 'juggle'"),
        (["rl.policy=x"], "rl.policy is filled in by the pipeline"),
        (["budget.minutes=-1"], "budget.minutes must be >= 0"),
        (["budget.expected_minutes={swim: 3}"], "budget.expected_minutes.swim"),
    ],
)
def test_mistakes_are_told_before_anything_runs(words, says):
    with pytest.raises(UserError, match=re.escape(says)):
        compose("quickstart", words)


def test_a_budget_that_is_used_up_ends_the_stage_and_keeps_what_was_done(tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.configs.stages.POLL_S", 0.05)
    stage = Stage(name="init", verb="init", config=compose("init", [f"out={tmp_path / 'p'}"]), done=tmp_path / "never")
    (tmp_path / "stages").mkdir()
    history = History(tmp_path / "stages" / "attempts.jsonl")
    with alone(tmp_path / "lock") as lock, pytest.raises(BudgetError, match="too much; stage init was not started"):
        run_stage(stage, tmp_path / "stages", history, lock, lambda: "too much")
    said = iter(["", "too much"])
    with alone(tmp_path / "lock") as lock, pytest.raises(BudgetError, match="too much; stage init was ended"):
        run_stage(stage, tmp_path / "stages", history, lock, lambda: next(said))
    assert history.seconds() > 0


def test_two_pipelines_do_not_share_a_run_folder(tmp_path):
    lock = tmp_path / "stages" / "lock"
    lock.parent.mkdir()
    with alone(lock), pytest.raises(UserError, match="is being run by another process"), alone(lock):
        pass
