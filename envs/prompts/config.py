"""Settings of prompt sets: prompts in a file, answered in one turn and scored by a function. Torch-free."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from burnish.envs.config import require
from burnish.envs.errors import UserError


class PromptFormat(StrEnum):
    """Which columns a record has; YAML spells the member name."""

    plain = "plain"
    """prompt, answer and, where there is one, data_source; whatever else there is goes to the verifier as `extra`."""
    verl = "verl"
    """data_source, prompt (chat messages), reward_model {style, ground_truth}, extra_info."""
    trl = "trl"
    """prompt (text or chat messages); every other column goes to the reward function under its name."""


@dataclass(kw_only=True)
class PromptColumns:
    """Which column is what; a dot leads into an object (`reward_model.ground_truth`). Empty takes the format's own name."""

    prompt: str = ""
    """Text, or a list of chat messages."""
    answer: str | None = ""
    """What the verifier compares with. Format trl has none of its own; null: there is none."""
    data_source: str = ""
    """Where a record comes from: a family in the tables, and an argument of verl's functions. Format trl has none of its own."""
    extra: str = ""
    """An object for the verifier's `extra`. Its own name is extra_info in verl; else it is all columns not named here."""


@dataclass(kw_only=True)
class PromptData:
    """Where the prompts are, and how a record reads."""

    path: str = ""
    """JSONL or Parquet file of prompts, instead of task folders."""
    heldout_path: str = ""
    """File of the split `heldout`; everything in data.path is then `train`."""
    heldout_fraction: float = 0.0
    """Share of data.path that is held out, chosen by a hash of the prompt: equal prompts land on one side."""
    format: PromptFormat = PromptFormat.plain
    """plain | verl | trl: the columns that a record has."""
    columns: PromptColumns = field(default_factory=PromptColumns)
    system: str = ""
    """System message put before every prompt."""
    suffix: str = ""
    """Text put after every prompt's last message, as it is: say here what form the answer should have."""
    reward_range: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """[low, high]: a reward outside is no verdict, one of at least `high` counts as passed."""

    def __post_init__(self) -> None:
        fraction = self.heldout_fraction
        require("data.heldout_fraction", fraction, 0 <= fraction < 1, "in [0, 1)")
        if self.heldout_path and fraction:
            raise UserError("data.heldout_path and data.heldout_fraction are two ways to hold out: give one of them")
        if not self.path and (self.heldout_path or fraction):
            raise UserError("data.heldout_path and data.heldout_fraction need data.path=FILE")
        bounds = self.reward_range
        is_range = len(bounds) == 2 and all(math.isfinite(bound) for bound in bounds) and bounds[0] < bounds[1]
        require("data.reward_range", list(bounds), is_range, "[low, high] with low < high")


@dataclass(kw_only=True)
class PromptsRun:
    """burnish prompts: problems of procedural families, with the package's own scorer, as a prompt file."""

    out: str = MISSING
    """JSONL file to write, for data.path of rl and eval with verifier=reasoning_gym."""
    source: str = "reasoning_gym"
    """The package that makes the problems; reasoning_gym is the one there is."""
    families: list[str] = field(default_factory=list)
    """Names of families; empty is all of them, without those whose problems do not pass the gate."""
    num_prompts: int = 200
    """Problems written, the same number of every family (the first ones take the rest)."""
    seed: int = 0
    """Every problem is a function of this seed."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options by family: `+options.chain_sum='{min_terms: 2, max_terms: 3}'`."""

    def __post_init__(self) -> None:
        require("source", repr(self.source), self.source == "reasoning_gym", "reasoning_gym")
        require("num_prompts", self.num_prompts, self.num_prompts >= max(1, len(self.families)), ">= 1 a family")
        require("seed", self.seed, self.seed >= 0, ">= 0")
        twice = [name for name in self.families if self.families.count(name) > 1]
        require("families", twice[:1], not twice, "names, each once")
        if strangers := [name for name in self.options if self.families and name not in self.families]:
            raise UserError(f"options.{strangers[0]}: families does not name it")
