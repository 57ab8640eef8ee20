"""Chaos: kill -9 of driver, worker, engine, trainer and container at random, and a restart of the Docker engine, under RL.

In schedule=lockstep and engine.deterministic=true a run is a function of its settings: the losses after any number of faults
are bit for bit those of a run that was left alone. `make chaos N=30` sets how many faults, and has the Docker engine
restarted, too; CI runs 5 without that.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
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
ROOT = Path(__file__).parents[2]
NUM_FAULTS = int(os.environ.get("BURNISH_FAULTS", "5"))
# the engine is everybody's: only who asks for chaos has it restarted
IS_ENGINE_RESTARTED = "BURNISH_FAULTS" in os.environ
MAX_STEPS = max(6, NUM_FAULTS // 2)
RUN = "chaos-run"
SETTINGS = [
    f"name={RUN}",
    "verifier=fakes:CoinVerifier",
    f"max_steps={MAX_STEPS}",
    "checkpoint_every=2",
    "wandb=disabled",
    "schedule=lockstep",
    "algo.max_offpolicy_steps=0",
    "algo.group_size=4",
    "algo.groups_per_step=2",
    "algo.max_attempts=20",
    "cluster.episodes_per_worker=8",
    "cluster.max_restarts=1000",
    "engine.deterministic=true",
    "episode.max_turns=3",
    "episode.max_turn_tokens=8",
    "episode.max_context_tokens=160",
]
ACTORS = {"worker": "WorkerActor", "engine": "GeneratorActor", "trainer": "TrainerActor"}


@dataclass
class Driver:
    """`burnish rl`, resumed whenever it was killed."""

    folder: Path
    words: list[str]
    process: "subprocess.Popen[bytes] | None" = None
    killed: set[int] = field(default_factory=set)

    def start(self) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        with (self.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [str(BURNISH), *self.words], cwd=self.folder, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        self.words = ["rl", f"resume={self.folder / 'runs' / RUN}"]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """Raises:
        AssertionError: it had ended by itself.
        """
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.killed.add(self.pid)

    def log(self) -> str:
        return (self.folder / "log.txt").read_text()[-4000:]

    def is_running(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None


def prepare(folder: Path) -> Driver:
    synthesise(SynthRun(out=str(folder / "tasks"), num_train=8, num_heldout=0, gates=False, sandbox=SandboxKind.local))
    initialise(InitRun(out=str(folder / "policy")))
    return Driver(folder, ["rl", "tasks=tasks", "policy=policy", "runs=runs", "sandbox=docker", *SETTINGS])


def losses(run: Path) -> dict[int, float]:
    """Loss of each optimizer step; superseded records left out."""
    path = run / "metrics.jsonl"
    return {r["step"]: r["train/loss"] for r in read_metrics(path) if "train/loss" in r} if path.is_file() else {}


def owned(pid: int, title: str) -> list[int]:
    """Processes of a driver whose Ray title names an actor."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"ray::{title}".encode() in (entry / "cmdline").read_bytes():
                mark = next(v for v in (entry / "environ").read_bytes().split(b"\0") if v.startswith(b"BURNISH_OWNER="))
                if mark.decode().split("/")[3] == str(pid):
                    found.append(int(entry.name))
    return found


def containers(run: str = RUN) -> list[str]:
    found = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"label=burnish.run={run}"], capture_output=True, text=True, check=True
    )
    return found.stdout.split()


def strike(fault: str, driver: Driver, draw: random.Random) -> bool:
    """Does it now; False when there is nothing to hit at this moment."""
    if fault == "driver":
        driver.kill()
        driver.start()
        return True
    if fault == "docker":
        restart_docker()
        return True
    if fault == "container":
        victims = containers()
        return (
            bool(victims)
            and subprocess.run(["docker", "kill", draw.choice(victims)], capture_output=True).returncode == 0
        )
    victims = owned(driver.pid, ACTORS[fault])
    if not victims:
        return False
    os.kill(draw.choice(victims), signal.SIGKILL)
    return True


def restart_docker() -> None:
    """Kill -9 of the engine, and an engine again, as set-up starts it."""
    pid = int(Path("/var/run/docker.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}/exe").exists())
    # its containerd ends with it; a new engine beside a dying one would find the old one's sockets
    time.sleep(1.0)
    subprocess.run(["bash", str(ROOT / ".ci" / "setup.sh")], check=True, capture_output=True, start_new_session=True)
    wait_for(lambda: subprocess.run(["docker", "version"], capture_output=True).returncode == 0)


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def faults_of(count: int, draw: random.Random) -> list[str]:
    """Every kind before any comes twice; one restart of the engine, in the middle, where it is asked for."""
    kinds = ["driver", *ACTORS, "container"]
    faults: list[str] = []
    while len(faults) < count:
        faults += draw.sample(kinds, len(kinds))
    faults = faults[:count]
    if IS_ENGINE_RESTARTED:
        faults[count // 2] = "docker"
    return faults


def torment(driver: Driver, draw: random.Random) -> list[str]:
    """Faults while the run goes on, each after it has made some progress or time has passed; returns what was done."""
    run, done = driver.folder / "runs" / RUN, []
    for fault in faults_of(NUM_FAULTS, draw):
        before, patience = len(losses(run)), time.monotonic() + draw.uniform(2, 12)
        while driver.is_running() and time.monotonic() < patience and len(losses(run)) <= before:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 1.5))
        deadline = time.monotonic() + 120
        while driver.is_running() and not strike(fault, driver, draw):
            assert time.monotonic() < deadline, f"nothing to hit with {fault}:\n{driver.log()}"
            time.sleep(0.1)
        if not driver.is_running():
            break
        done.append(fault)
    return done


@pytest.mark.docker
@pytest.mark.slow
def test_faults_change_no_loss_and_leave_nothing(tmp_path):
    undisturbed, driver = prepare(tmp_path / "calm"), prepare(tmp_path / "chaos")
    shutil.rmtree(driver.folder / "policy")
    shutil.copytree(undisturbed.folder / "policy", driver.folder / "policy")
    undisturbed.start()
    assert undisturbed.process is not None
    assert undisturbed.process.wait(timeout=600) == 0, undisturbed.log()
    expected = losses(undisturbed.folder / "runs" / RUN)
    assert sorted(expected) == list(range(1, MAX_STEPS + 1))

    driver.start()
    assert driver.process is not None
    try:
        done = torment(driver, random.Random(11))
        assert driver.process.wait(timeout=900) == 0, driver.log()
    finally:
        driver.process.kill()
        driver.process.wait()
    assert len(done) == NUM_FAULTS, f"the run ended after {done}"
    run = driver.folder / "runs" / RUN
    assert losses(run) == expected
    report = audit(run)
    assert report.is_clean, report.violations
    assert report.facts["optimizer steps"] == MAX_STEPS
    assert subprocess.run([str(BURNISH), "reap"], capture_output=True).returncode == 0
    assert containers() == []
    assert orphans(driver.killed) == {}


def orphans(drivers: set[int]) -> dict[int, str]:
    """Processes of drivers that are dead."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            owner = next((v.decode() for v in variables if v.startswith(b"BURNISH_OWNER=")), "").partition("=")[2]
            if owner and int(owner.split("/")[3]) in drivers and is_alive(owner) is False:
                found[int(entry.name)] = owner
    return found
