"""Settings of the RL stage, of an evaluation and of an audit. Torch-free, so that composing a run loads no device.

Every check that needs no file is made here, at compose time: what passes is a run that can start.
"""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from burnish.envs.config import SandboxConfig, SandboxKind, require
from burnish.envs.errors import UserError
from burnish.envs.prompts.config import PromptData
from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.inference.config import EngineConfig
from burnish.policy.training.config import TrainConfig
from burnish.rollout.guard import Rule
from burnish.verifiers.config import GradingConfig

UNGRADED = "none"
"""The verifier of a run that grades nothing; only a stage that needs no reward takes it."""

# `async` is a keyword, so the members cannot be written as a class body; YAML spells the member name
Schedule = StrEnum("Schedule", {"async": "async", "lockstep": "lockstep"})


class Agent(StrEnum):
    """Who acts in an evaluation; YAML spells the member name."""

    policy = "policy"
    oracle = "oracle"
    nop = "nop"


@dataclass(kw_only=True)
class EpisodeConfig:
    """What one episode may use up; whichever runs out first ends it, and it is graded as it stands."""

    max_turns: int = 8
    """Assistant turns."""
    max_turn_tokens: int = 64
    """Sampled tokens of one turn."""
    max_context_tokens: int = 1024
    """Tokens of the whole context, prompt and outputs included; at most what the engine holds for one request."""
    wall_clock_s: float = 300.0
    """Seconds from the first request to the end of the last command; grading is not counted."""
    command_timeout_s: float = 10.0
    """Seconds one command may run; its process tree is killed after that and the episode goes on."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_tokens", "max_context_tokens"):
            require(f"episode.{name}", getattr(self, name), getattr(self, name) >= 1, ">= 1")
        for name in ("wall_clock_s", "command_timeout_s"):
            require(f"episode.{name}", getattr(self, name), getattr(self, name) > 0, "> 0 seconds")


@dataclass(kw_only=True)
class SamplingConfig:
    """Every sampling field the engine knows, always sent: nothing is filled in from a model's defaults."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens with this probability; 1 is off."""
    top_k: int = 0
    """Most likely tokens kept; 0 is off."""

    def __post_init__(self) -> None:
        require("sampling.temperature", self.temperature, self.temperature >= 0, ">= 0")
        require("sampling.top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        require("sampling.top_k", self.top_k, self.top_k >= 0, ">= 0")


@dataclass(kw_only=True)
class ClusterConfig:
    """The Ray cluster and how many of each actor; the default is one machine, everything colocated."""

    address: str = ""
    """Ray address of a running cluster; empty starts a local one that dies with the driver."""
    num_cpus: int = 0
    """Logical CPUs of the local cluster; 0 takes the machine's."""
    cpus_per_generator: float = 0.75
    cpus_per_trainer: float = 0.75
    cpus_per_worker: float = 0.5
    """Logical CPUs an actor declares: placement is refused at once when the node lacks them."""
    num_generators: int = 1
    num_workers: int = 1
    threads_per_actor: int = 1
    """CPU threads of torch in the generator and in the trainer."""
    episodes_per_worker: int = 64
    """Episodes one worker runs at a time; each needs a sandbox."""
    object_store_bytes: int = 80 * 2**20
    """Shared memory of the local cluster's object store."""
    start_deadline_s: float = 180.0
    """Seconds an actor may take to come up."""
    call_deadline_s: float = 1800.0
    """Seconds a train step, a weight push or a checkpoint may take before the run stops and names it."""
    max_restarts: int = 8
    """Times that one actor's process may die and be replaced before the run stops; `burnish rl resume=RUN` goes on."""

    def __post_init__(self) -> None:
        for name in ("num_generators", "num_workers", "threads_per_actor", "episodes_per_worker"):
            require(f"cluster.{name}", getattr(self, name), getattr(self, name) >= 1, ">= 1")
        for name in (
            "cpus_per_generator",
            "cpus_per_trainer",
            "cpus_per_worker",
            "start_deadline_s",
            "call_deadline_s",
        ):
            require(f"cluster.{name}", getattr(self, name), getattr(self, name) > 0, "> 0")
        for name in ("num_cpus", "max_restarts"):
            require(f"cluster.{name}", getattr(self, name), getattr(self, name) >= 0, ">= 0")
        least = 75 * 2**20
        require("cluster.object_store_bytes", self.object_store_bytes, self.object_store_bytes >= least, f">= {least}")


@dataclass(kw_only=True)
class PacingConfig:
    """What makes a step, how old it may be, and how often an episode is tried: the loop's part of a stage's `algo`."""

    group_size: int = 8
    """Trajectories of one task in a group."""
    groups_per_step: int = 8
    """Completed groups of one optimizer step."""
    max_offpolicy_steps: int = 1
    """Largest age of a trained token in policy versions; older ones are masked and counted. 0 is on-policy."""
    max_attempts: int = 3
    """Tries at a slot that infrastructure or the verifier failed, before it is dropped."""

    def __post_init__(self) -> None:
        for name in ("group_size", "groups_per_step", "max_attempts"):
            require(f"algo.{name}", getattr(self, name), getattr(self, name) >= 1, ">= 1")
        require("algo.max_offpolicy_steps", self.max_offpolicy_steps, self.max_offpolicy_steps >= 0, ">= 0")


@dataclass(kw_only=True)
class AlgoConfig(PacingConfig):
    """The estimator: groups, advantage and loss."""

    group_size: int = 8
    """Trajectories of one task that an advantage is relative to."""
    groups_per_step: int = 8
    """Completed groups of one optimizer step; those without variance are dropped and not replaced."""
    advantage: str = "centred"
    """Built-in name or import path `package.module:function`; see rollout/advantage.py."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Keyword options of the advantage."""
    loss: str = "clipped"
    """Built-in name or import path `package.module:function`; see rollout/losses.py."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Keyword options of the loss, and corrections that every loss takes (tis_cap, sequence_mask_delta, ...)."""
    reduction: str = "token_mean"
    """What the summed loss is divided by: token_mean | rollout_mean | constant."""
    decoupled: bool = False
    """Clip against the trainer's own scoring at the start of the step instead of the engine's log-probability."""
    replay_routes: bool = True
    """Force the experts that the engine used for each token in the trainer's forward."""
    keep_constant_groups: bool = False
    """Train on groups whose rewards are all equal, too: for an advantage that compares across groups (reinforce_pp)."""
    permute_rewards: bool = False
    """A control, not a method: rewards are permuted within each batch before advantages, so nothing can be learnt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require("algo.group_size", self.group_size, self.group_size >= 2, ">= 2 (an advantage needs a sibling)")
        reductions = ("token_mean", "rollout_mean", "constant")
        require("algo.reduction", self.reduction, self.reduction in reductions, f"one of {', '.join(reductions)}")


@dataclass(kw_only=True)
class ActingRun:
    """What a stage that acts and learns is told, whatever it learns from."""

    policy: str = ""
    """Policy folder to start from."""
    resume: str = ""
    """Run folder to go on with; its own config.yaml decides, other keys are refused."""
    name: str = ""
    """Folder of the run under `runs`."""
    runs: str = "runs"
    """Where run folders lie."""
    max_steps: int = 25
    """Optimizer steps."""
    passes: int = 1_000
    """Times the tasks are gone through at most; the run ends with whichever comes first."""
    schedule: Schedule = Schedule["async"]
    """async: episodes go on while the trainer trains. lockstep: a slot's policy version is fixed, for bitwise tests."""
    sandbox: SandboxKind = SandboxKind.auto
    """auto | docker | local; auto takes local with a warning when no Docker engine answers."""
    limits: SandboxConfig = field(default_factory=SandboxConfig)
    harness: str = ""
    """Built-in name or import path `package.module:Class`; empty is bash, and answer for prompts."""
    verifier: str = ""
    """Built-in name or import path: of a class for task folders (empty is hidden_tests), of a function for prompts."""
    grading: GradingConfig = field(default_factory=GradingConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(lr=2e-4, weight_decay=0.0))
    tokens_per_micro_batch: int = 2048
    """Rows of one packed micro-batch: bounds the activations in memory, never the result."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint_every: int = 5
    """Optimizer steps between training states; the last step always has one."""
    gate_max_kl: float = 1e-2
    """Largest mean KL estimate between engine and trainer on the same tokens at launch; above it the run refuses to train."""
    seed: int = 0
    """Order of tasks, every sampled token and every resampled reward."""
    guard: list[str] = field(default_factory=lambda: ["train/grad_norm > 1000 for 2: rollback"])
    """Rules `METRIC OP NUMBER [for N]: pause|rollback` on what is logged; see rollout/guard.py."""
    max_rollbacks: int = 3
    """Times a rule may take the run back; after that it pauses."""
    wandb: str = "auto"
    """auto | online | offline | disabled; auto is online with a key, else offline."""

    def check_acting(self, algo: PacingConfig) -> None:
        """What holds between these settings and the loop's part of `algo`.

        Raises:
            ValueError: what does not, and what to set.
        """
        for name in ("max_steps", "passes", "checkpoint_every", "tokens_per_micro_batch"):
            require(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        require("gate_max_kl", self.gate_max_kl, self.gate_max_kl > 0, "> 0")
        modes = ("auto", "online", "offline", "disabled")
        require("wandb", repr(self.wandb), self.wandb in modes, f"one of {', '.join(modes)}")
        is_name = self.name not in ("", ".", "..") and "/" not in self.name
        require("name", repr(self.name), is_name, "a folder name without '/'")
        for name in ("seed", "max_rollbacks"):
            require(name, getattr(self, name), getattr(self, name) >= 0, ">= 0")
        for rule in self.guard:
            Rule.parse(rule)
        if self.schedule is Schedule.lockstep and algo.max_offpolicy_steps:
            raise ValueError(
                f"schedule=lockstep trains each slot with the version that sampled it: set algo.max_offpolicy_steps=0, "
                f"got {algo.max_offpolicy_steps}"
            )
        if self.schedule is not Schedule.lockstep and algo.max_offpolicy_steps == 0:
            raise ValueError(
                "algo.max_offpolicy_steps=0 is the lockstep schedule: set schedule=lockstep, or allow >= 1"
            )
        temperature = self.sampling.temperature
        require("sampling.temperature", temperature, temperature > 0, "> 0 in RL and distillation")
        running = self.cluster.num_workers * self.cluster.episodes_per_worker
        if running < algo.group_size:
            raise ValueError(
                f"cluster.num_workers x cluster.episodes_per_worker = {running} episodes at a time cannot hold one "
                f"group of algo.group_size={algo.group_size}"
            )
        held = self.engine.max_contexts * self.cluster.num_generators
        if running > held:
            raise ValueError(
                f"cluster.num_workers x cluster.episodes_per_worker = {running} episodes at a time need as many contexts, "
                f"engine.max_contexts x cluster.num_generators = {held}: lower the first or raise the second"
            )


@dataclass(kw_only=True)
class RlRun(ActingRun):
    """burnish rl: one domain's tasks turn one policy into a better one."""

    tasks: str = ""
    """Task set folder."""
    data: PromptData = field(default_factory=PromptData)
    name: str = "rl"
    """Folder of the run under `runs`."""
    split: str = "train"
    """Split of the task set that is trained on."""
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    guard: list[str] = field(
        default_factory=lambda: [
            "train/grad_norm > 1000 for 2: rollback",
            "rollout/zero_variance_share > 0.99 for 8: pause",
        ]
    )
    """Rules `METRIC OP NUMBER [for N]: pause|rollback` on what is logged; see rollout/guard.py."""

    def __post_init__(self) -> None:
        fill_in(self)
        self.check_acting(self.algo)


@dataclass(kw_only=True)
class EvalRun:
    """burnish eval: every task of a split, graded; a summary with its interval."""

    tasks: str = ""
    """Task set folder."""
    data: PromptData = field(default_factory=PromptData)
    agent: Agent = Agent.policy
    """policy | oracle (plays solution/solve.sh, or says a prompt's answer) | nop (leaves at once, or says nothing)."""
    policy: str = ""
    """Policy folder; only with agent=policy."""
    split: str = ""
    """Split of the task set; empty takes heldout where the set has one, else all."""
    samples: int = 1
    """Episodes of each task."""
    limit: int = 0
    """First tasks of the split only; 0 takes all."""
    out: str = ""
    """Folder of results.jsonl and summary.json; empty is runs/eval/<agent>-<task set>. What is there is gone on with."""
    stage: str = ""
    """Name of the stage in the summary; empty is the agent's."""
    sandbox: SandboxKind = SandboxKind.auto
    """auto | docker | local; auto takes local with a warning when no Docker engine answers."""
    limits: SandboxConfig = field(default_factory=SandboxConfig)
    harness: str = ""
    """Built-in name or import path `package.module:Class`; empty is bash, and answer for prompts."""
    verifier: str = ""
    """Built-in name or import path: of a class for task folders (empty is hidden_tests), of a function for prompts."""
    grading: GradingConfig = field(default_factory=GradingConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    concurrency: int = 16
    """Episodes at a time; each needs a sandbox."""
    max_attempts: int = 3
    """Tries at an episode that infrastructure or the verifier failed; after that it counts as ungraded, never as failed."""
    confidence: float = 0.95
    """Level of the interval."""
    seed: int = 0
    """Every sampled token."""

    def __post_init__(self) -> None:
        fill_in(self)
        for name in ("samples", "concurrency", "max_attempts"):
            require(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        for name in ("limit", "seed"):
            require(name, getattr(self, name), getattr(self, name) >= 0, ">= 0")
        require("confidence", self.confidence, 0 < self.confidence < 1, "inside (0, 1)")
        most = self.engine.max_contexts
        require("concurrency", self.concurrency, self.concurrency <= most, f"<= engine.max_contexts={most}")
        if self.agent is Agent.policy and not self.policy:
            raise ValueError("agent=policy needs policy=DIR (a policy folder); agent=oracle and agent=nop need none")
        if self.agent is not Agent.policy and self.policy:
            raise ValueError(f"agent={self.agent} plays no policy: leave policy out, or set agent=policy")


def fill_in(run: RlRun | EvalRun) -> None:
    """The harness and the verifier that were left empty, and the one turn of an answer.

    Raises:
        UserError: task folders and prompts at once, prompts without a verifier, or no grading at all.
    """
    if run.tasks and run.data.path:
        raise UserError(f"tasks={run.tasks} and data.path={run.data.path}: give task folders or prompts, not both")
    if run.data.path and not run.verifier:
        raise UserError(
            "data.path needs verifier=NAME (exact, number, math, reasoning_gym) or verifier=package.module:function"
        )
    if run.verifier == UNGRADED:
        raise UserError(f"verifier={UNGRADED} grades nothing, and a reward is needed here: name a verifier")
    run.harness = run.harness or ("answer" if run.data.path else "bash")
    if run.harness == "answer":
        # there is no second one: what is reckoned with the longest rollout is reckoned with this
        run.episode = replace(run.episode, max_turns=1)
    run.verifier = run.verifier or "hidden_tests"


@dataclass(kw_only=True)
class AuditRun:
    """burnish audit RUN: prove from the ledger that every slot is trained once, dropped with a reason, or pending."""

    run: str = MISSING
    """Run folder."""


@dataclass(kw_only=True)
class ReportRun:
    """burnish report RUN: one HTML page of a run, finished or not, of whatever verb."""

    run: str = MISSING
    """Run folder of a pipeline, a training or an evaluation."""
    out: str = ""
    """HTML file to write; empty is report/index.html in the run folder."""


@dataclass(kw_only=True)
class ReplayRun:
    """burnish replay RUN SLOT: one trajectory of an RL run computed again, token by token, and its verdict reached again."""

    run: str = MISSING
    """Run folder."""
    slot: str = MISSING
    """Slot, such as 000-000003-001, whose counting or last attempt is taken; or an attempt, such as 000-000003-001-00."""
    verdict: bool = True
    """Grade it again, for which its commands are run again in a fresh sandbox."""
    sandbox: SandboxKind = SandboxKind.auto
    """Where they are run: docker | local. auto is what the run's settings say, and docker where they leave it open: what a
    policy did in a container is never done to this machine unasked."""
    max_difference: float = 0.01
    """Largest difference of a token's log-probability (nats) that is equal where the run was not deterministic."""
    rows: int = 100
    """Tokens shown; of more, those that differ most."""
    json: bool = False
    """Print one JSON object with every token instead."""

    def __post_init__(self) -> None:
        require("max_difference", self.max_difference, 0 <= self.max_difference < math.inf, ">= 0 and finite")
        require("rows", self.rows, self.rows >= 1, ">= 1")
