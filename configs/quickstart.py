"""burnish quickstart: synth -> fresh policy -> eval -> SFT -> eval -> RL -> eval -> report, in one run folder.

Each stage is the verb of its name in a process of its own, with its own resume; a stage that is done is not done again.
The same command after a kill goes on where it stopped. Settings of every stage are checked before the first one starts.
"""

import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from burnish.configs.overrides import quoted
from burnish.configs.schema import to_yaml
from burnish.envs.config import SandboxKind, SynthRun
from burnish.envs.errors import UserError
from burnish.envs.sandbox.lease import boot_id, driver_identity, pid_namespace, start_time
from burnish.policy.config import InitRun
from burnish.rollout.config import EvalRun, RlRun
from burnish.sft.config import SftRun

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class QuickstartRun:
    """burnish quickstart: the main job at the size of a laptop."""

    name: str = "quickstart"
    """Folder of the run under `runs`; the same command goes on with it."""
    runs: str = "runs"
    """Where run folders lie."""
    seed: int = 0
    """Of tasks, weights, data order and every sampled token."""
    sandbox: SandboxKind = SandboxKind.auto
    """auto | docker | local, for every stage."""
    synth: SynthRun = MISSING
    """Settings of `burnish synth`."""
    init: InitRun = MISSING
    """Settings of `burnish init`."""
    sft: SftRun = MISSING
    """Settings of `burnish sft`."""
    rl: RlRun = MISSING
    """Settings of `burnish rl`."""
    eval: EvalRun = MISSING
    """Settings of `burnish eval`; policy, out and stage are filled in for each stage."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name:
            raise UserError(f"name must be a folder name without '/', got {self.name!r}")
        # later stages look for what these leave in the run's own folder
        for stage, part in (("sft", self.sft), ("rl", self.rl)):
            if (part.runs, part.name) != (f"{self.runs}/{self.name}", stage):
                raise UserError(f"{stage}.runs and {stage}.name are quickstart's own: set runs and name instead")


class StageError(RuntimeError):
    """A stage ended with an error of ours; its own output says which."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One process of the pipeline."""

    name: str
    verb: str
    config: Any
    """Root dataclass of the verb."""
    done: Path
    """What exists when the stage is complete."""
    inputs: tuple[Path, ...] = ()
    """Files of earlier stages whose change makes this stage stale."""

    def command(self) -> list[str]:
        """How the stage is started."""
        run = [sys.executable, "-m", "burnish.configs.cli", self.verb]
        folder = Path(self.config.runs) / self.config.name if self.verb == "rl" else None
        if folder is not None and (folder / "config.yaml").is_file():
            # `resume` takes the settings of the folder: other ones would silently not be used
            if (folder / "config.yaml").read_text() != to_yaml(self.config):
                raise UserError(f"{folder} was started with other settings of rl: remove it, or choose another name=")
            return [*run, f"resume={quoted(str(folder))}"]
        return [*run, *overrides_of(self.config)]

    def fingerprint(self) -> str:
        """Hash of the settings and of what goes in."""
        digest = hashlib.sha256("\n".join([self.verb, *overrides_of(self.config)]).encode())
        for path in self.inputs:
            digest.update(path.read_bytes() if path.is_file() else b"missing")
        return digest.hexdigest()


def main(run: QuickstartRun) -> int:
    """Run what is left of the pipeline and write the report."""
    # imported here: the command line lists this verb without loading torch
    from burnish.rollout.container_events import ContainerEvents, count_containers
    from burnish.rollout.report import ReportInputs, write_report

    run_dir = Path(run.runs) / run.name
    (run_dir / "stages").mkdir(parents=True, exist_ok=True)
    history = History(run_dir / "stages" / "attempts.jsonl")
    with alone(run_dir / "stages" / "lock") as lock:
        with ContainerEvents(run_dir / "containers.jsonl", run.rl.limits.engine_url):
            for stage in pipeline(run):
                code = run_stage(stage, run_dir / "stages", history, lock)
                if code:
                    return code
        inputs = ReportInputs(
            evals={name: run_dir / "eval" / name for name in ("base", "sft", "rl")},
            sft=run_dir / "sft",
            rl=run_dir / "rl",
            containers=count_containers(run_dir / "containers.jsonl", history.drivers()),
            seconds=history.seconds(),
            seed=run.seed,
        )
        write_report(inputs, run_dir / "report")
    logger.info("Report: %s (summary.json, table.md, curves.png)", run_dir / "report")
    return 0


def pipeline(run: QuickstartRun) -> list[Stage]:
    """The stages in order."""
    run_dir = Path(run.runs) / run.name
    taskset = Path(run.synth.out) / "taskset.json"
    base, taught, trained = Path(run.init.out), run_dir / "sft" / "policy", run_dir / "rl" / "policy"

    def evaluate(name: str, policy: Path) -> Stage:
        out = run_dir / "eval" / name
        config = dataclasses.replace(run.eval, policy=str(policy), out=str(out), stage=name)
        inputs = (taskset, policy / "model.safetensors")
        return Stage(name=f"eval-{name}", verb="eval", config=config, done=out / "summary.json", inputs=inputs)

    def trains(name: str, policy: Path, start: Path) -> Stage:
        inputs = (taskset, start / "model.safetensors")
        return Stage(name=name, verb=name, config=getattr(run, name), done=policy / "model.safetensors", inputs=inputs)

    return [
        Stage(name="synth", verb="synth", config=run.synth, done=taskset),
        Stage(name="init", verb="init", config=run.init, done=base / "model.safetensors"),
        evaluate("base", base),
        trains("sft", taught, base),
        evaluate("sft", taught),
        trains("rl", trained, taught),
        evaluate("rl", trained),
    ]


def run_stage(stage: Stage, folder: Path, history: "History", lock: int) -> int:
    """Run one stage unless it is done; returns the exit code of a user's mistake, 0 otherwise.

    Raises:
        StageError: the stage failed for another reason.
    """
    marker = folder / f"{stage.name}.json"
    fingerprint = stage.fingerprint()
    if marker.is_file() and stage.done.exists() and json.loads(marker.read_text())["fingerprint"] == fingerprint:
        logger.info("Stage %s is done already", stage.name)
        return 0
    command = stage.command()
    logger.info("Stage %s: burnish %s ...", stage.name, stage.verb)
    started = time.time()
    # libraries' deprecations are not the user's to mend
    env = {"PYTHONWARNINGS": "ignore::FutureWarning"} | os.environ
    # the child inherits the lock: a second quickstart waits for the orphans of a killed one too
    process = subprocess.Popen(command, pass_fds=[lock], env=env)
    history.begin(stage.name, process.pid, started)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # the stage got the signal too and closes its containers
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        history.end(stage.name, process.pid, started, time.time())
    if code == 2:
        return 2
    if code:
        raise StageError(f"stage {stage.name} ended with exit code {code}; the same command goes on with it")
    if not stage.done.exists():
        raise StageError(f"stage {stage.name} ended well but left no {stage.done}")
    staged = marker.with_suffix(".writing")
    staged.write_text(json.dumps({"fingerprint": fingerprint, "command": command[3:]}, indent=1) + "\n")
    staged.replace(marker)
    logger.info("Stage %s took %.0f s", stage.name, time.time() - started)
    return 0


class History:
    """Which processes ran the stages, and how long: appended, so that it survives a kill of the pipeline."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, stage: str, pid: int, started: float) -> None:
        parts = [*driver_identity().split("/")[:1], boot_id(), pid_namespace(), str(pid), start_time(pid) or "unknown"]
        self._append({"stage": stage, "pid": pid, "started": started, "driver": "/".join(parts)})

    def end(self, stage: str, pid: int, started: float, ended: float) -> None:
        self._append({"stage": stage, "pid": pid, "started": started, "seconds": ended - started})

    def drivers(self) -> set[str]:
        """Identities of all stage processes, as their containers' labels spell them."""
        return {record["driver"] for record in self._read() if "driver" in record}

    def seconds(self) -> float:
        """Time that stages ran, over all tries whose end was seen."""
        return sum(record["seconds"] for record in self._read() if "seconds" in record)

    def _append(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        return [json.loads(line) for line in self.path.read_text().split("\n")[:-1] if line.endswith("}")]


@contextmanager
def alone(path: Path) -> Iterator[int]:
    """Hold the run folder; yields the lock's descriptor.

    Raises:
        UserError: another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path.parents[1]} is being run by another process; wait for it or stop it") from None
        yield handle
    finally:
        os.close(handle)


def overrides_of(config: Any) -> list[str]:
    """The overrides that make `config` out of its verb's defaults: every leaf that differs from the schema's."""
    values = flat(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))
    defaults = flat(OmegaConf.to_container(OmegaConf.structured(type(config)), enum_to_str=True))
    return [f"{key}={spelled(value)}" for key, value in values.items() if defaults.get(key, MISSING) != value]


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> leaf."""
    if isinstance(tree, dict) and tree:
        return {k: v for name, inner in tree.items() for k, v in flat(inner, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): tree}


def spelled(value: Any) -> str:
    """A value as an override spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return "[" + ",".join(spelled(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{spelled(item)}" for name, item in value.items()) + "}"
    return repr(value)
