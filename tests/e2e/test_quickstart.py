"""The pipeline end to end at its smallest size: killed in the middle, gone on with, reported, and not done twice."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.configs.quickstart import overrides_of, pipeline
from burnish.configs.schema import compose, to_yaml
from burnish.envs.errors import UserError

ENV = os.environ | {"OMP_NUM_THREADS": "1"}
STAGES = ["synth", "init", "eval-base", "sft", "eval-sft", "rl", "eval-rl"]


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
    assert "Stage synth is done already" in output
    assert "Stage eval-base is done already" in output
    summary = json.loads((run / "report" / "summary.json").read_text())
    assert list(summary) == ["stages", "gains", "containers", "episodes", "tokens_trained", "seconds"]
    assert list(summary["stages"]) == ["base", "sft", "rl"]
    assert list(summary["gains"]) == ["sft-base", "rl-sft"]
    for domains in summary["stages"].values():
        assert {d: set(r) for d, r in domains.items()} == {"terminal": {"pass", "n", "lo", "hi"}}
        assert domains["terminal"]["n"] == 8
    for domains in summary["gains"].values():
        assert {d: set(r) for d, r in domains.items()} == {"terminal": {"mean", "lo", "hi"}}
    # every episode has a container for the agent and a fresh one for the verifier
    assert summary["containers"] >= 2 * summary["episodes"]
    assert summary["episodes"] >= 3 * 8 + 8
    assert (run / "report" / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "| rl | terminal |" in (run / "report" / "table.md").read_text()
    manifest = json.loads((run / "rl" / "manifest.json").read_text())
    assert (manifest["finished"], manifest["steps"]) == (True, 2)
    lineage = json.loads((run / "rl" / "policy" / "burnish.json").read_text())
    taught = json.loads((run / "sft" / "manifest.json").read_text())
    assert lineage["parents"]["policy"] == taught["policy"]
    audit = subprocess.run(
        [sys.executable, "-m", "burnish.configs.cli", "audit", str(run / "rl")], capture_output=True, text=True, env=ENV
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr

    output = finish(start(tmp_path), 60)
    for stage in STAGES:
        assert f"Stage {stage} is done already" in output
    assert json.loads((run / "report" / "summary.json").read_text()) == summary


def test_each_stage_is_started_with_the_settings_it_was_composed_with(tmp_path):
    run = compose(
        "quickstart", [f"runs={tmp_path}", "seed=5", "sandbox=local", "sft.data.max_tokens=77", "name=odd,name"]
    )
    stages = pipeline(run)
    assert [stage.name for stage in stages] == STAGES
    for stage in stages:
        assert compose(stage.verb, overrides_of(stage.config)) == stage.config
    by_name = {stage.name: stage for stage in stages}
    assert by_name["sft"].config.data.max_tokens == 77
    assert by_name["rl"].config.train.seed == 5
    assert by_name["eval-rl"].config.policy == str(tmp_path / "odd,name" / "rl" / "policy")
    assert by_name["synth"].config.sandbox == "local"
    assert not by_name["rl"].command()[-1].startswith("resume=")
    rl = tmp_path / "odd,name" / "rl"
    rl.mkdir(parents=True)
    (rl / "config.yaml").write_text(to_yaml(by_name["rl"].config))
    assert by_name["rl"].command()[-1].startswith("resume=")
    # `resume` would take the settings of the folder, and the new ones would silently not be used
    other = dataclasses.replace(by_name["rl"].config, max_steps=21)
    with pytest.raises(UserError, match="started with other settings"):
        dataclasses.replace(by_name["rl"], config=other).command()


def test_two_pipelines_do_not_share_a_run_folder(tmp_path):
    from burnish.configs.quickstart import alone

    lock = tmp_path / "stages" / "lock"
    lock.parent.mkdir()
    with alone(lock), pytest.raises(UserError, match="is being run by another process"), alone(lock):
        pass
