"""The report: numbers by hand, and containers as the engine counts them."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from burnish.envs.sandbox.lease import labels
from burnish.policy.training.metrics import MetricLogger, WandbMode
from burnish.rollout.container_events import ContainerEvents, count_containers
from burnish.rollout.ledger import Ledger
from burnish.rollout.report import ReportInputs, acting_totals, write_report


def write_eval(folder: Path, passed: list[bool]) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {"task": f"t{i}", "domain": "terminal", "passed": p, "attempts": 1 + (i == 0)} for i, p in enumerate(passed)
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rate = {"pass": sum(passed) / len(passed), "n": len(passed), "lo": 0.0, "hi": 1.0}
    (folder / "summary.json").write_text(json.dumps({"domains": {"terminal": rate}}))
    return folder


def test_summary_by_hand(tmp_path, capsys):
    evals = {
        "base": {"terminal": write_eval(tmp_path / "base", [False] * 8)},
        "sft": {"terminal": write_eval(tmp_path / "sft", [True] * 4 + [False] * 4)},
        "rl": {"terminal": write_eval(tmp_path / "rl-eval", [True] * 8)},
        "distill": {"terminal": write_eval(tmp_path / "distill", [False] * 2 + [True] * 6)},
    }
    with MetricLogger(tmp_path / "sft-run", mode=WandbMode.disabled) as log:
        for step in (1, 2, 3):
            log.log({"train/loss": 1.0, "train/loss_tokens": 10.0}, step=step)
    with MetricLogger(tmp_path / "sft-run", mode=WandbMode.disabled, resumed_from=2) as log:
        log.log({"train/loss": 1.0, "train/loss_tokens": 30.0}, step=3)
    inputs = ReportInputs(evals=evals, sft=tmp_path / "sft-run", acting=(), containers=48, seconds=90.0)
    summary = write_report(inputs, tmp_path / "report")
    assert summary["stages"]["sft"] == {"terminal": {"pass": 0.5, "n": 8, "lo": 0.0, "hi": 1.0}}
    assert summary["gains"]["sft-base"]["terminal"]["mean"] == 0.5
    assert 0 < summary["gains"]["sft-base"]["terminal"]["lo"] < 0.5 < summary["gains"]["sft-base"]["terminal"]["hi"] < 1
    assert summary["gains"]["rl-sft"]["terminal"]["mean"] == 0.5
    assert summary["gains"]["distill-specialist"]["terminal"]["mean"] == -0.25
    # 36 tries of 32 episodes; step 3 was trained again after the resume and counts once
    assert (summary["episodes"], summary["tokens_trained"], summary["containers"]) == (36, 50, 48)
    assert json.loads((tmp_path / "report" / "summary.json").read_text()) == summary
    assert "| sft | terminal | 0.500 | [0.000, 1.000] | 8 | +0.500 [" in (tmp_path / "report" / "table.md").read_text()
    assert (tmp_path / "report" / "curves.png").stat().st_size > 10_000
    assert "48 containers, 36 episodes, 50 tokens trained, 1.5 minutes" in capsys.readouterr().out


def test_totals_of_an_empty_ledger_are_zero(tmp_path):
    Ledger(tmp_path / "ledger.sqlite").close()
    assert acting_totals(tmp_path) == {"episodes": 0, "tokens": 0}


@pytest.mark.docker
def test_containers_are_counted_from_the_engines_events_by_driver(tmp_path):
    path = tmp_path / "containers.jsonl"
    ids = []

    def create(driver: str) -> None:
        given = labels(run_id="r", attempt_id="a", role="agent", driver=driver, lease_s=60)
        flags = [f"--label={key}={value}" for key, value in given.items()]
        made = subprocess.run(
            ["docker", "create", *flags, "burnish-base:1"], capture_output=True, text=True, check=True
        )
        ids.append(made.stdout.strip())

    mine, other = (f"host/boot/ns/{os.getpid()}/{number}" for number in (1, 2))
    try:
        with ContainerEvents(path):
            create(mine)
            create(other)
            create(mine)
        with ContainerEvents(path):
            create(mine)
            time.sleep(0.2)
    finally:
        subprocess.run(["docker", "rm", "-f", *ids], capture_output=True, check=True)
    assert count_containers(path, {mine}) == 3
    assert count_containers(path, {mine, other}) == 4
    assert count_containers(path, {"host/boot/ns/0/0"}) == 0
