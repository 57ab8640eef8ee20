"""Settings of on-policy distillation. Torch-free, so that composing a run loads no device.

Every check that needs no file is made here, at compose time: what passes is a run that can start.
"""

import re
from dataclasses import dataclass, field

from omegaconf import MISSING

from burnish.envs.config import require
from burnish.policy.training.config import TrainConfig
from burnish.rollout.config import UNGRADED, ActingRun, PacingConfig

# a teacher's name is part of metric names, messages and the lineage
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
NEAR_AN_END = 0.05


@dataclass(kw_only=True)
class TeacherConfig:
    """One specialist and the domain it teaches."""

    policy: str = MISSING
    """Policy folder."""
    tasks: str = MISSING
    """Task set folder on which the student plays for this teacher."""
    split: str = "train"
    """Split of the task set."""
    domain: str = ""
    """Only tasks whose metadata name this domain; empty takes all."""
    weight: float = 1.0
    """Loss of a token of this teacher, next to the other teachers'."""
    share: float = 1.0
    """Slots of this teacher, next to the other teachers'; every stretch of the run's order has this mixture."""
    evaluation: str = ""
    """Folder of a `burnish eval` of this very policy; health.min_pass is then asked of it."""


@dataclass(kw_only=True)
class HealthConfig:
    """What a teacher must show before it is learnt from; read on the student's first trajectories."""

    min_logprob_std: float = 1e-3
    """Standard deviation of its log-probabilities over the trajectories' tokens; a policy that lost its weights has 0."""
    max_entropy_share: float = 0.9
    """Its mean entropy, as a share of the uniform distribution's."""
    max_perplexity_share: float = 0.5
    """Its perplexity on the trajectories, as a share of the uniform distribution's (the vocabulary's size)."""
    min_pass: float = 0.0
    """Pass rate of its evaluation, where one is given."""

    def __post_init__(self) -> None:
        require("health.min_logprob_std", self.min_logprob_std, self.min_logprob_std >= 0, ">= 0")
        for name in ("max_entropy_share", "max_perplexity_share"):
            require(f"health.{name}", getattr(self, name), 0 < getattr(self, name) <= 1, "in (0, 1]")
        require("health.min_pass", self.min_pass, 0 <= self.min_pass <= 1, "0 to 1")


@dataclass(kw_only=True)
class CacheConfig:
    """Teachers' hidden states on disk, in the run folder."""

    max_gib: float = 4.0
    """Size of all of them; the oldest go first. Must hold one optimizer step's."""

    def __post_init__(self) -> None:
        require("cache.max_gib", self.max_gib, self.max_gib > 0, "> 0")


@dataclass(kw_only=True)
class DistillAlgoConfig(PacingConfig):
    """The objective, and how many of the student's trajectories make a step."""

    group_size: int = 1
    """Trajectories of one task in a row; nothing is compared within a group, so one is best."""
    groups_per_step: int = 96
    """Completed groups of one optimizer step."""
    beta: float = 1.0
    """1: reverse KL(student | teacher). 0: forward KL. Between them generalised Jensen-Shannon, which tends to 0 at both
    ends: values nearer than 0.05 to an end are refused."""
    temperature: float = 1.0
    """Divides both sides' logits in the divergence; sampling has its own."""
    reduction: str = "token_mean"
    """token_mean: all tokens of all trajectories weigh the same. rollout_mean: all trajectories do."""
    vocabulary_chunk: int = 8192
    """Ids whose logits are held at a time: bounds memory, never the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_end = self.beta in (0, 1)
        is_inside = NEAR_AN_END <= self.beta <= 1 - NEAR_AN_END
        require("algo.beta", self.beta, is_end or is_inside, f"0, 1, or {NEAR_AN_END} to {1 - NEAR_AN_END}")
        require("algo.temperature", self.temperature, self.temperature > 0, "> 0")
        reductions = ("token_mean", "rollout_mean")
        require("algo.reduction", self.reduction, self.reduction in reductions, f"one of {', '.join(reductions)}")
        require("algo.vocabulary_chunk", self.vocabulary_chunk, self.vocabulary_chunk >= 1, ">= 1")


@dataclass(kw_only=True)
class DistillRun(ActingRun):
    """burnish distill: several specialists into one policy, on the trajectories of that policy."""

    name: str = "distill"
    """Folder of the run under `runs`."""
    max_steps: int = 16
    """Optimizer steps."""
    verifier: str = UNGRADED
    """none grades nothing: the objective needs no reward, and an episode then has the agent's sandbox only. Or a built-in
    name (hidden_tests) or an import path `package.module:Class`, for the reward as a metric."""
    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Name -> policy, tasks, split, domain, weight, share, evaluation, such as teachers.coding.policy=DIR. Each domain's
    trajectories are compared with its own teacher."""
    algo: DistillAlgoConfig = field(default_factory=DistillAlgoConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(lr=3e-4, weight_decay=0.0))

    def __post_init__(self) -> None:
        self.harness = self.harness or "bash"
        self.check_acting(self.algo)
        for name, teacher in self.teachers.items():
            is_name = NAME.fullmatch(name) is not None
            require("a teacher's name", repr(name), is_name, "of a-z, 0-9, _ and -")
            for key in ("weight", "share"):
                value = getattr(teacher, key)
                require(f"teachers.{name}.{key}", value, 0 < value < float("inf"), "> 0")
