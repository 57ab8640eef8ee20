"""Settings of the verbs that live in this folder: doctor, new. Torch-free."""

import math
from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from burnish.envs.config import SandboxKind, require


@dataclass(kw_only=True)
class DoctorRun:
    """`burnish doctor`: what this machine has of what the quickstart needs, and what to do about the rest."""

    sandbox: SandboxKind = SandboxKind.auto
    """What runs are meant to use: docker makes the engine a must, auto warns where it is missing, local leaves it out."""
    runs: str = "runs"
    """Folder of the runs: looked at for space and write access."""
    engine_url: str = ""
    """Docker engine; empty reads DOCKER_HOST, and without that the local socket."""
    timeout_s: float = 15.0
    """Seconds that one probe may take; all of them run side by side."""
    json: bool = False
    """Print one JSON object instead of lines."""

    def __post_init__(self) -> None:
        is_fine = math.isfinite(self.timeout_s) and self.timeout_s > 0
        require("timeout_s", self.timeout_s, is_fine, "> 0 seconds")
        require("runs", repr(self.runs), bool(self.runs), "a folder")


class Kind(StrEnum):
    """What `burnish new` makes; YAML spells the member name."""

    task = "task"
    verifier = "verifier"
    harness = "harness"


@dataclass(kw_only=True)
class NewRun:
    """`burnish new KIND NAME`: a task, verifier or harness that runs as it is, to be changed."""

    kind: Kind = MISSING
    """task | verifier | harness."""
    name: str = MISSING
    """Of a task: kebab-case, its folder. Of a verifier or harness: a Python identifier in snake_case, its module."""
    out: str = ""
    """Folder that gets it; empty is `tasks` for a task, `plugins` for a verifier or harness."""
