"""What a run's processes are told once, at their start. Plain values: they cross process borders."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.prompts.config import PromptData
from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.training.config import TrainConfig
from burnish.rollout.config import Agent, AlgoConfig, EpisodeConfig, EvalRun, RlRun, SamplingConfig
from burnish.verifiers.config import GradingConfig

if TYPE_CHECKING:
    from burnish.rollout.policy_trainer import PolicyTrainer


@dataclass(frozen=True, kw_only=True)
class PolicyTrainerSettings(ABC):
    """What any trainer of rollouts needs; crosses into its process once, and makes the trainer there."""

    stage: str
    """What trains, for the lineage."""
    policy: str
    """Policy folder the run started from."""
    blocks: str
    checkpoints: str
    weights: str
    """Folder of published versions."""
    train: TrainConfig
    temperature: float
    """Of sampling: the policy's log-probabilities are taken at it."""
    reserved_ids: tuple[int, ...]
    """Ids that the engine never samples, beside the model's placeholders."""
    tokens_per_micro_batch: int
    deterministic: bool

    @property
    def replays_routes(self) -> bool:
        """The experts that the engine recorded are forced in the trainer's forward."""
        return False

    @abstractmethod
    def build(self) -> "PolicyTrainer":
        """In the trainer's own process: torch is loaded here."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(PolicyTrainerSettings):
    """Of the trainer of RL."""

    stage: str = "rl"
    algo: AlgoConfig
    max_rollout_tokens: int
    """Sampled tokens one rollout can have, for reduction=constant."""

    @property
    def replays_routes(self) -> bool:
        return self.algo.replay_routes

    def build(self) -> "PolicyTrainer":
        from burnish.rollout.trainer import Trainer

        return Trainer(self)


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """What every episode of a run shares; crosses into the workers once."""

    run_id: str
    agent: Agent
    tasks: str
    """Task set folder; empty where `data` names prompts."""
    further_tasks: tuple[str, ...] = ()
    """Task set folders beside it, of a run over several domains."""
    policy: str
    """Policy folder whose tokenizer encodes; empty for scripted agents."""
    blocks: str
    """Folder of the token logs."""
    harness: str
    verifier: str
    sandbox: SandboxKind
    limits: SandboxConfig
    episode: EpisodeConfig
    encoding: EncodingConfig
    sampling: SamplingConfig
    seed: int
    concurrency: int
    """Episodes at a time in one process."""
    data: PromptData = field(default_factory=PromptData)
    grading: GradingConfig = field(default_factory=GradingConfig)

    @classmethod
    def of(cls, run: RlRun | EvalRun, *, run_id: str, agent: Agent, blocks: str, concurrency: int) -> "EpisodeSettings":
        """Settings of a run's episodes; what both kinds of run call the same is taken from `run`."""
        return cls(
            run_id=run_id,
            agent=agent,
            tasks=run.tasks,
            policy=run.policy,
            blocks=blocks,
            harness=run.harness,
            verifier=run.verifier,
            sandbox=run.sandbox,
            limits=run.limits,
            episode=run.episode,
            encoding=run.encoding,
            sampling=run.sampling,
            seed=run.seed,
            concurrency=concurrency,
            data=run.data,
            grading=run.grading,
        )
