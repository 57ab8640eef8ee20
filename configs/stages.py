"""One stage of a pipeline as a process: how it is started, when it is done, what it may use up, and its history.

Knows no verb's meaning. A stage is done when its marker says that the same settings made the same inputs into what is
there; so a pipeline that was killed goes on where it stopped, and one whose settings changed does again what they touch.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from burnish.configs.overrides import quoted
from burnish.configs.schema import to_yaml
from burnish.envs.errors import UserError
from burnish.envs.sandbox.lease import boot_id, driver_identity, pid_namespace, start_time
from burnish.policy.checkpoint.json_file import read_object
from burnish.policy.checkpoint.whole_files import write_json

logger = logging.getLogger(__name__)

# seconds between two looks at what a running stage has used up
POLL_S = 5.0


class StageError(RuntimeError):
    """A stage ended with an error of ours; its own output says which."""


class BudgetError(RuntimeError):
    """What the pipeline may use is used up; what was done so far stays."""


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
        folder = Path(self.config.runs) / self.config.name if self.verb in ("rl", "distill") else None
        if folder is not None and (folder / "config.yaml").is_file():
            # `resume` takes the settings of the folder: other ones would silently not be used
            if (folder / "config.yaml").read_text() != to_yaml(self.config):
                raise UserError(
                    f"{folder} was started with other settings of {self.name}: remove it, or choose another name="
                )
            return [*run, f"resume={quoted(str(folder))}"]
        return [*run, *overrides_of(self.config)]

    def is_done(self, markers: Path) -> bool:
        """These settings made these inputs into what is there."""
        marker = markers / f"{self.name}.json"
        return marker.is_file() and self.done.exists() and read_marker(marker)["fingerprint"] == self.fingerprint()

    def fingerprint(self) -> str:
        """Hash of the settings and of what goes in."""
        digest = hashlib.sha256("\n".join([self.verb, *overrides_of(self.config)]).encode())
        for path in self.inputs:
            digest.update(path.read_bytes() if path.is_file() else b"missing")
        return digest.hexdigest()


def read_marker(path: Path) -> dict[str, Any]:
    """Raises:
    UserError: it is damaged.
    """
    return read_object(path, "fingerprint", "command", advice="remove it, and the stage is done again")


def run_stage(stage: Stage, folder: Path, history: "History", lock: int, excess: Callable[[], str]) -> int:
    """Run one stage unless it is done; returns the exit code of a user's mistake, 0 otherwise.

    Args:
        folder: of the markers.
        lock: descriptor of the pipeline's lock, handed on.
        excess: asked while the stage runs; a sentence ends it.

    Raises:
        StageError: the stage failed for another reason.
        BudgetError: `excess` said something.
    """
    if stage.is_done(folder):
        logger.info("Stage %s is done already", stage.name)
        return 0
    if said := excess():
        raise BudgetError(f"{said}; stage {stage.name} was not started")
    fingerprint, command = stage.fingerprint(), stage.command()
    logger.info("Stage %s: burnish %s ...", stage.name, stage.verb)
    started = time.time()
    # libraries' deprecations are not the user's to mend
    env = {"PYTHONWARNINGS": "ignore::FutureWarning"} | os.environ
    # the child inherits the lock: a second pipeline waits for the orphans of a killed one too
    process = subprocess.Popen(command, pass_fds=[lock], env=env)
    history.begin(stage.name, process.pid, started)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = wait(process, stage, excess)
    except KeyboardInterrupt:
        process.wait()  # the stage got the signal too and closes its containers
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        history.end(stage.name, process.pid, started, time.time())
    if code == 2:
        return 2
    if code:
        raise StageError(f"stage {stage.name} ended with exit code {code}; what it said stands above")
    if not stage.done.exists():
        raise StageError(f"stage {stage.name} ended well but left no {stage.done}")
    write_json(folder / f"{stage.name}.json", {"fingerprint": fingerprint, "command": command[3:]})
    logger.info("Stage %s took %.0f s", stage.name, time.time() - started)
    return 0


def wait(process: "subprocess.Popen[bytes]", stage: Stage, excess: Callable[[], str]) -> int:
    """The exit code of a stage.

    Raises:
        BudgetError: it was ended for using too much.
    """
    while True:
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if said := excess():
                process.terminate()
                process.wait()
                raise BudgetError(f"{said}; stage {stage.name} was ended and goes on from its last state") from None


class History:
    """Which processes ran the stages, and how long: appended, so that it survives a kill of the pipeline."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began: float | None = None
        """When the stage that runs now was started."""

    def begin(self, stage: str, pid: int, started: float) -> None:
        self._began = started
        parts = [*driver_identity().split("/")[:1], boot_id(), pid_namespace(), str(pid), start_time(pid) or "unknown"]
        self._append({"stage": stage, "pid": pid, "started": started, "driver": "/".join(parts)})

    def end(self, stage: str, pid: int, started: float, ended: float) -> None:
        self._began = None
        self._append({"stage": stage, "pid": pid, "started": started, "seconds": ended - started})

    def drivers(self) -> set[str]:
        """Identities of all stage processes, as their containers' labels spell them."""
        return {record["driver"] for record in self._read() if "driver" in record}

    def seconds(self, *, with_running: bool = False) -> float:
        """Time that stages ran, over all tries whose end was seen, and of the one that runs now if asked for."""
        running = time.time() - self._began if with_running and self._began is not None else 0.0
        return running + sum(record["seconds"] for record in self._read() if "seconds" in record)

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
