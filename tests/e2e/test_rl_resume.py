"""RL in its real processes (Ray, DeepSpeed, engine, local sandboxes): kill -9 of the driver, resume, audit, no remains."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.envs.config import SandboxKind, SynthRun
from burnish.envs.sandbox.lease import is_alive
from burnish.envs.synthesis.pipeline import main as synthesise
from burnish.policy.config import InitRun
from burnish.policy.initialize import main as initialise
from burnish.policy.training.metrics import read_metrics
from burnish.rollout.audit import audit

BURNISH = Path(sys.executable).with_name("burnish")
# set it to kill more often: BURNISH_KILLS=10 pytest tests/e2e/test_rl_resume.py
NUM_KILLS = int(os.environ.get("BURNISH_KILLS", "2"))
SETTINGS = [
    "name=run",
    "sandbox=local",
    "verifier=fakes:CoinVerifier",
    "max_steps=8",
    "checkpoint_every=2",
    "wandb=disabled",
    "algo.group_size=4",
    "algo.groups_per_step=2",
    "cluster.episodes_per_worker=8",
    "engine.deterministic=true",
    "episode.max_turns=2",
    "episode.max_turn_tokens=8",
    "episode.max_context_tokens=120",
]


def burnish(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [str(BURNISH), *words], cwd=folder, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}
        )


def steps_logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return sum("train/loss" in record for record in read_metrics(path)) if path.is_file() else 0


def owned_processes() -> dict[int, str]:
    """Process -> the driver it belongs to, where that driver is dead."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        owner = next((v.decode() for v in variables if v.startswith(b"BURNISH_OWNER=")), "").partition("=")[2]
        if owner and is_alive(owner) is False:
            found[int(entry.name)] = owner
    return found


@pytest.mark.slow
def test_a_driver_killed_at_random_points_goes_on_and_every_slot_is_accounted_for(tmp_path):
    synthesise(
        SynthRun(out=str(tmp_path / "tasks"), num_train=8, num_heldout=0, gates=False, sandbox=SandboxKind.local)
    )
    initialise(InitRun(out=str(tmp_path / "policy")))
    run, draw = tmp_path / "run" / "run", random.Random(7)
    words = ["rl", "tasks=tasks", "policy=policy", "runs=run", *SETTINGS]
    owners = set()
    for _ in range(NUM_KILLS):
        before = steps_logged(run)
        driver = burnish(tmp_path, *words)
        deadline = time.monotonic() + 240
        while driver.poll() is None and time.monotonic() < deadline and steps_logged(run) == before:
            time.sleep(0.05)
        assert driver.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
        time.sleep(draw.uniform(0, 1.5))
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        owners.add(driver.pid)
        words = ["rl", f"resume={run}"]
    assert burnish(tmp_path, *words).wait(timeout=400) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    report = audit(run)
    assert report.is_clean, report.violations
    assert report.facts["optimizer steps"] == 8
    assert (run / "policy" / "model.safetensors").is_file()
    mine = {pid: owner for pid, owner in owned_processes().items() if int(owner.split("/")[3]) in owners}
    assert not mine, f"processes of killed drivers live on: {mine}"
    # engine and trainer agreed bit for bit on tokens of the version that was trained, whatever was killed in between
    fresh = [
        r["train/mismatch_kl_fresh"] for r in read_metrics(run / "metrics.jsonl") if "train/mismatch_kl_fresh" in r
    ]
    assert fresh
    assert max(fresh) == 0.0


def test_placement_is_refused_before_a_cluster_starts(tmp_path):
    synthesise(
        SynthRun(out=str(tmp_path / "tasks"), num_train=1, num_heldout=0, gates=False, sandbox=SandboxKind.local)
    )
    initialise(InitRun(out=str(tmp_path / "policy")))
    started = time.monotonic()
    driver = burnish(tmp_path, "rl", "tasks=tasks", "policy=policy", "cluster.num_cpus=1", *SETTINGS)
    assert driver.wait(timeout=120) == 2
    assert "this machine has" in (tmp_path / "log.txt").read_text()
    assert time.monotonic() - started < 60
