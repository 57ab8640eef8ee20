"""Settings of grading by a function. Torch-free."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from burnish.envs.config import require


class Style(StrEnum):
    """How a reward function is called; YAML spells the member name."""

    auto = "auto"
    """By its parameters: `completions` is trl, `solution_str` verl, `completion` plain."""
    plain = "plain"
    """fn(completion=, answer= or ground_truth=, prompt=, extra=, data_source=), of which it names what it wants."""
    verl = "verl"
    """fn(data_source=, solution_str=, ground_truth=, extra_info=)."""
    trl = "trl"
    """fn(prompts=[...], completions=[...], column=[...], ...) -> [reward]; lists of one."""


@dataclass(kw_only=True)
class GradingConfig:
    """How rewards come about: whether verdicts are reused, and how a reward function is run (in processes of its own)."""

    reuse: bool = False
    """Artifacts of a task that were graded before get that verdict again. Only for tests whose verdict depends on nothing else."""
    style: Style = Style.auto
    """auto | plain | verl | trl: how the function is called."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function, the same in every call: `+grading.options.tolerance=1e-3`."""
    timeout_s: float = 10.0
    """Seconds one call may take; its process is then killed, and the outcome is verifier_failed."""
    processes: int = 2
    """Calls at a time."""
    memory_mb: int = 4096
    """Memory of one process in MiB."""

    def __post_init__(self) -> None:
        require(
            "grading.timeout_s",
            self.timeout_s,
            math.isfinite(self.timeout_s) and 0 < self.timeout_s <= 600,
            "in (0, 600]",
        )
        require("grading.processes", self.processes, 1 <= self.processes <= 256, "1 to 256")
        require("grading.memory_mb", self.memory_mb, self.memory_mb >= 64, ">= 64 MiB")
