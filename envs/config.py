"""Settings of sandboxes, of task synthesis and of the reaper. Torch-free."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from burnish.envs.errors import UserError


class SandboxKind(StrEnum):
    """Where commands run; YAML spells the member name."""

    auto = "auto"
    docker = "docker"
    local = "local"


class Domain(StrEnum):
    """What tasks are about; each has families of its own."""

    terminal = "terminal"
    coding = "coding"


def require(name: str, value: object, is_ok: bool, expected: str) -> None:
    """Raises:
    UserError: naming the key, what it got and what is expected.
    """
    if not is_ok:
        raise UserError(f"{name} must be {expected}, got {value}")


@dataclass(kw_only=True)
class SandboxConfig:
    """Limits of one sandbox and where the engine is. A task's own limits (task.toml) win where it sets them."""

    image: str = "burnish-base:1"
    """Image of tasks that name none, made by `make setup`; it needs bash and coreutils."""
    engine_url: str = ""
    """Docker engine; empty reads DOCKER_HOST, and without that the local socket."""
    workdir: str = "/app"
    """Working directory of tasks whose Dockerfile and task.toml set none."""
    cpus: float = 1.0
    """CPU cores one container may use."""
    memory_mb: int = 512
    """Memory of one container in MiB; swap is off."""
    max_processes: int = 256
    """Processes and threads at a time in one container."""
    max_file_mb: int = 1024
    """Largest file a process may write, in MiB."""
    output_cap_bytes: int = 10_000
    """Bytes of one command's output that are kept (head and tail); the rest is counted."""
    artifact_cap_mb: int = 64
    """Bytes of all files taken out of a sandbox at once, in MiB."""
    artifact_max_files: int = 10_000
    """Files taken out of a sandbox at once."""
    start_timeout_s: float = 60.0
    """Seconds one call to the engine may take before it counts as an infrastructure failure."""
    build_timeout_s: float = 600.0
    """Seconds an image build may take."""
    engine_wait_s: float = 120.0
    """Seconds to wait for an engine that stopped answering (a restart) before what was asked of it counts as failed."""
    lease_s: float = 14_400.0
    """Seconds after its creation at which the reaper may remove a container, whoever owns it. Longer than any episode."""
    driver: str = ""
    """Identity of the run's driver process (`envs.sandbox.lease.driver_identity`); empty is this process."""

    def __post_init__(self) -> None:
        require("image", repr(self.image), bool(self.image), "the name of an image")
        require("workdir", repr(self.workdir), self.workdir.startswith("/"), "an absolute path")
        # the engine refuses less than 0.01 cores and less than 6 MiB
        require("cpus", self.cpus, math.isfinite(self.cpus) and self.cpus >= 0.01, ">= 0.01 cores")
        require("memory_mb", self.memory_mb, self.memory_mb >= 6, ">= 6 MiB")
        require("max_processes", self.max_processes, self.max_processes >= 8, ">= 8")
        require("output_cap_bytes", self.output_cap_bytes, self.output_cap_bytes >= 16, ">= 16 bytes")
        for name in ("max_file_mb", "artifact_cap_mb", "artifact_max_files"):
            require(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        for name in ("start_timeout_s", "build_timeout_s", "engine_wait_s", "lease_s"):
            value = getattr(self, name)
            require(name, value, math.isfinite(value) and value > 0, "> 0 seconds")


@dataclass(kw_only=True)
class SynthRun:
    """`burnish synth`: candidates from the families, through the gates, into a task set."""

    out: str = MISSING
    """Directory of the task set: new, empty, or one that an interrupted run with the same settings left."""
    domain: Domain = Domain.terminal
    """What the tasks are about: `terminal` (files and shell commands) or `coding` (Python functions against hidden tests)."""
    seed: int = 0
    """Every task is a function of this seed."""
    num_train: int = 200
    """Admitted training tasks."""
    num_heldout: int = 200
    """Admitted held-out tasks; none of their answers or oracle commands occurs in a training task."""
    num_demonstrations: int = 0
    """Oracle trajectories of further training candidates, for SFT only: played in shared sandboxes, without a task folder."""
    families: list[str] = field(default_factory=list)
    """Names of task families; empty is all of the domain."""
    difficulty: list[int] = field(default_factory=lambda: [1])
    """Difficulty levels drawn from, 1 the easiest."""
    num_words: int = 200
    """Words that names are made of, 80 to 200: fewer are easier to learn to copy."""
    workers: int = 4
    """Tasks gated at a time."""
    gates: bool = True
    """Run the gates (oracle passes, no-op fails) in fresh sandboxes; off writes candidates unchecked and says so."""
    verifier: str = "burnish.verifiers.hidden_tests:HiddenTests"
    """Import path of the class that grades for the gates; it is called with the sandboxes."""
    sandbox: SandboxKind = SandboxKind.auto
    """Where the gates run."""
    limits: SandboxConfig = field(default_factory=SandboxConfig)
    """Limits of the gates' sandboxes."""

    def __post_init__(self) -> None:
        require("num_train", self.num_train, self.num_train >= 0, ">= 0")
        require("num_heldout", self.num_heldout, self.num_heldout >= 0, ">= 0")
        is_fine = self.num_demonstrations == 0 or (self.num_demonstrations > 0 and self.num_train > 0)
        require("num_demonstrations", self.num_demonstrations, is_fine, ">= 0, and 0 without training tasks")
        require("num_words", self.num_words, 80 <= self.num_words <= 200, "80 to 200")
        require("workers", self.workers, self.workers >= 1, ">= 1")
        require("difficulty", self.difficulty, bool(self.difficulty) and min(self.difficulty) >= 1, "levels >= 1")


@dataclass(kw_only=True)
class ReapRun:
    """`burnish reap`: removes containers that nobody owns any more."""

    run: str = ""
    """Remove every container of this run, alive or not; empty removes those whose driver is dead or lease is over."""
    engine_url: str = ""
    """Docker engine; empty reads DOCKER_HOST, and without that the local socket."""
