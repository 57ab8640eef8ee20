"""What a sandbox is: a persistent shell in an isolated file tree, files in, artifacts out. Knows no engine.

Everything here is synchronous; callers that run many episodes use threads.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.errors import UserError
from burnish.envs.task import Task

log = logging.getLogger(__name__)


class SandboxError(RuntimeError):
    """The infrastructure failed (engine, image, container). Never a reward of 0: the attempt is repeated or left out."""


class SandboxCrashed(SandboxError):
    """The container stopped by itself: what ran in it ended its first process or used up its memory."""


class SandboxUnavailable(UserError):
    """The kind of sandbox that was asked for cannot be had on this machine."""


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """What one command did, as its terminal shows it."""

    output: str
    """stdout and stderr in the order written, escape sequences removed, head and tail kept when longer than the cap."""
    exit_code: int | None
    """None when the command did not end by itself (time limit). 124 and 137 prove nothing: see `timed_out`."""
    timed_out: bool
    truncated: bool
    """True when `output` lacks bytes the command wrote."""
    total_bytes: int
    """Bytes the command wrote, kept or not."""
    duration_s: float
    shell_restarted: bool = False
    """True when the shell ended (`exit`, time limit, killed): the next command gets a new one in the same directory, but
    variables and functions are gone."""


@dataclass(frozen=True, kw_only=True)
class ArtifactFile:
    """One regular file that left a sandbox."""

    path: str
    """Absolute path in the sandbox."""
    content: bytes = field(repr=False)
    mode: int = 0o644
    """Permission bits; set-id and sticky bits never cross."""


@dataclass(frozen=True, kw_only=True)
class Artifacts:
    """Regular files and directories taken from a sandbox, in memory: nothing of it touches the host's file system."""

    files: tuple[ArtifactFile, ...] = ()
    directories: tuple[str, ...] = ()
    """Absolute paths, parents first."""
    missing: tuple[str, ...] = ()
    """Asked for, but not there."""
    rejected: tuple[tuple[str, str], ...] = ()
    """(path, why): links, devices, FIFOs, files over the caps."""

    def file(self, path: str) -> ArtifactFile | None:
        return next((file for file in self.files if file.path == path), None)

    @property
    def content_hash(self) -> str:
        """sha256 over paths, modes and contents: equal for equal artifacts, whichever sandbox they came from."""
        digest = sha256()
        for path in sorted(self.directories):
            digest.update(f"d {path}\0".encode("utf-8", "surrogateescape"))
        for file in sorted(self.files, key=lambda file: file.path):
            head = f"f {file.path}\0{file.mode:o} {len(file.content)}\0"
            digest.update(head.encode("utf-8", "surrogateescape") + file.content)
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class OneShot:
    """A command run as the only program of a fresh sandbox, and what it left behind."""

    exit_code: int | None
    """None after the time limit."""
    timed_out: bool
    duration_s: float
    artifacts: Artifacts


class Sandbox(Protocol):
    """One isolated file tree with one persistent bash. Used by one thread at a time."""

    id: str

    def run(self, command: str, timeout_s: float) -> ExecResult:
        """Runs bash text; directory, variables and background jobs stay for the next command, stdin is empty.

        After `timeout_s` every process that the command started is killed, also those that left its session; older
        background processes live on, and the next command is answered (by a new shell, see `shell_restarted`).

        Raises:
            SandboxCrashed: what ran inside ended the sandbox, now or during an earlier command.
            SandboxError: the infrastructure failed.
        """
        ...

    def put_files(self, files: Mapping[str, bytes | Path], destination: str) -> None:
        """Writes root-owned files under `destination`; keys are relative paths. A `Path` keeps its executable bit."""
        ...

    def get_artifacts(self, paths: Sequence[str]) -> Artifacts:
        """Takes regular files and directories below absolute `paths`, within the caps; links never leave."""
        ...

    def alive(self) -> bool: ...

    def close(self) -> None:
        """Removes everything; idempotent, and silent when it is gone already."""
        ...


class SandboxFactory(Protocol):
    """Makes sandboxes of one kind; thread-safe."""

    kind: SandboxKind

    def create(self, task: Task, *, role: str, run_id: str, attempt_id: str) -> Sandbox:
        """A started sandbox with the task's environment in it.

        Raises:
            SandboxError: the infrastructure failed, nothing is left behind.
            TaskError: the task's environment cannot be built.
        """
        ...

    def run_once(
        self,
        task: Task,
        *,
        run_id: str,
        attempt_id: str,
        artifacts: Artifacts,
        files: Mapping[str, Path],
        command: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        collect: str,
    ) -> OneShot:
        """Runs `command` in a fresh sandbox of the task's *verifier* image, and takes what is below `collect`.

        Args:
            artifacts: files of the agent, restored at their paths before anything runs.
            files: trusted files by absolute path, read-only, executable and root-owned; they win over artifacts.
            command: program and arguments, without a shell, stdin empty.
            collect: absolute directory, fresh and empty at the start; read after the last process has ended.
        """
        ...

    def close(self) -> None:
        """Closes what is still open; idempotent."""
        ...


def open_sandboxes(config: SandboxConfig, kind: SandboxKind = SandboxKind.auto) -> SandboxFactory:
    """The factory for `kind`; `auto` is Docker, or with one warning the local subprocess sandbox where no engine answers.

    Raises:
        SandboxUnavailable: `docker` was asked for and no engine answers, or it lacks the base image.
    """
    # both import this module
    factory: Any
    if kind != SandboxKind.local:
        from burnish.envs.sandbox.docker import DockerSandboxes

        try:
            factory = DockerSandboxes(config)
            return factory
        except SandboxUnavailable as error:
            if kind == SandboxKind.docker:
                raise
            log.warning("%s Falling back to local subprocesses: nothing isolates them.", error)
    from burnish.envs.sandbox.local import LocalSandboxes

    factory = LocalSandboxes(config)
    return factory
