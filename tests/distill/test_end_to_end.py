"""`burnish distill` in its real processes (Ray, DeepSpeed, engine, local sandboxes): killed, gone on with, the same bits."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distill_world import TEACHERS, make_policies

from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.training.metrics import read_metrics
from burnish.rollout.audit import audit
from burnish.rollout.ledger_view import LedgerView
from burnish.verifiers.types import Outcome

BURNISH = Path(sys.executable).with_name("burnish")
STEPS, PER_STEP = 3, 6
# the agent's container is the only one an episode has, and there is nothing to grade with: these tasks have no tests
SETTINGS = [
    "policy=student",
    *(f"teachers.{name}.{key}" for name in TEACHERS for key in (f"policy={name}", f"tasks=tasks-{name}", "split=all")),
    "sandbox=local",
    "wandb=disabled",
    "schedule=lockstep",
    "engine.deterministic=true",
    "algo.max_offpolicy_steps=0",
    f"algo.groups_per_step={PER_STEP}",
    f"max_steps={STEPS}",
    "checkpoint_every=1",
    "cluster.episodes_per_worker=6",
    "episode.max_turns=2",
    "episode.max_turn_tokens=8",
    "episode.max_context_tokens=120",
    "train.lr=2e-4",
]


def burnish(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen([str(BURNISH), *words], cwd=folder, stdout=log, stderr=log)


def losses_of(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    return {r["step"]: r["train/loss"] for r in read_metrics(path) if "train/loss" in r} if path.is_file() else {}


@pytest.mark.slow
def test_a_killed_distillation_ends_with_the_same_bits_and_every_slot_once(tmp_path, make_task):
    make_policies(tmp_path)
    for name in TEACHERS:
        (tmp_path / f"tasks-{name}").mkdir()
        for number in range(4):
            task = make_task(f"{name}-{number}", {"instruction.md": f"Write {name} to out.txt\n"})
            shutil.move(task, tmp_path / f"tasks-{name}" / task.name)
    log = tmp_path / "log.txt"
    assert burnish(tmp_path, "distill", "name=whole", *SETTINGS).wait(timeout=400) == 0, log.read_text()[-4000:]
    driver = burnish(tmp_path, "distill", "name=killed", *SETTINGS)
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    deadline = time.monotonic() + 300
    while not losses_of(killed) and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert driver.poll() is None, log.read_text()[-4000:]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert burnish(tmp_path, "distill", f"resume={killed}").wait(timeout=400) == 0, log.read_text()[-4000:]

    assert len(losses_of(whole)) == STEPS
    assert losses_of(killed) == losses_of(whole)
    assert policy_hash(killed / "policy") == policy_hash(whole / "policy")
    for run in (whole, killed):
        report = audit(run)
        assert report.is_clean, report.violations
        assert report.slots["trained"] == STEPS * PER_STEP
    check_what_is_left(whole, tmp_path)


def check_what_is_left(run: Path, tmp_path: Path) -> None:
    ledger = LedgerView.open(run / "ledger.sqlite")
    rows = ledger.rows("SELECT outcome, reward, is_graded FROM attempts WHERE outcome != 'cancelled'")
    assert {row["outcome"] for row in rows} <= {str(o) for o in Outcome if o.has_reward}
    assert {(row["reward"], row["is_graded"]) for row in rows} == {(None, 0)}, "nothing was graded, and nothing made up"
    tasks = ledger.rows(
        "SELECT step, substr(task_id, 1, 4) AS domain, count(*) AS n FROM slots WHERE step IS NOT NULL GROUP BY 1, 2"
    )
    assert {(row["domain"], row["n"]) for row in tasks} == {("codi", PER_STEP // 2), ("term", PER_STEP // 2)}
    ledger.close()
    records = [r for r in read_metrics(run / "metrics.jsonl") if "train/loss" in r]
    for record in records:
        assert {"distill/kl", "distill/coding/kl", "distill/terminal/kl", "distill/entropy", "distill/age_max"} <= set(
            record
        )
        assert record["distill/age_max"] == 0
        assert record["train/mismatch_kl_fresh"] < 1e-9
    assert not any("rollout/reward" in r for r in read_metrics(run / "metrics.jsonl"))
    lineage = json.loads((run / "policy" / "burnish.json").read_text())
    assert lineage["stage"] == "distill"
    for name, folder in (("policy", "student"), *((f"teacher.{t}", t) for t in TEACHERS)):
        assert lineage["parents"][name] == policy_hash(tmp_path / folder)
    assert list((run / "teacher-states").iterdir()), "states of the teachers are on disk"
    # a second start of a finished run does nothing
    done = subprocess.run([str(BURNISH), "distill", f"resume={run}"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert "done already" in done.stderr
