"""Settings of supervised fine-tuning. Torch-free, so that composing a run loads no device."""

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.training.config import BatchConfig, TrainConfig


class DataFormat(StrEnum):
    """What a record of the data file is; YAML spells the member name."""

    auto = "auto"
    """`transcript` where a record has a task_id, else `chat`."""
    chat = "chat"
    """{"messages": [...], "tools": [...]} in OpenAI's form."""
    transcript = "transcript"
    """A task's trajectory as `burnish synth` writes it: `messages` beside the task's facts."""


class OnOverflow(StrEnum):
    """What happens to a conversation that is longer than data.max_tokens. Nothing is cut without being asked for."""

    error = "error"
    drop = "drop"
    truncate = "truncate"


@dataclass(kw_only=True)
class DataConfig:
    """Where the conversations come from."""

    path: str = MISSING
    """A .jsonl file (one JSON object a line) or a .parquet file."""
    format: DataFormat = DataFormat.auto
    max_tokens: int = 1024
    """Longest conversation, in tokens."""
    on_overflow: OnOverflow = OnOverflow.error
    """error | drop (counted) | truncate (the first max_tokens tokens stay; what is lost is counted)."""
    validation_path: str = ""
    """Conversations that are only scored, in the same format; empty scores none."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"data.max_tokens must be >= 2, got {self.max_tokens}")


@dataclass(kw_only=True)
class SftRun:
    """burnish sft: teach a policy to say what the assistant says in a set of conversations."""

    data: DataConfig = field(default_factory=DataConfig)
    policy: str = MISSING
    """Policy folder to start from."""
    name: str = "sft"
    """Folder of the run under `runs`; the trained policy is its `policy` folder. The same command goes on with it."""
    runs: str = "runs"
    """Where run folders lie."""
    epochs: int = 3
    """Times every conversation is trained on."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(lr=2e-3, warmup_steps=10))
    """Learning rate schedule and optimizer; total_steps is filled in, and decay_steps=0 decays over the last fifth."""
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    checkpoint_every: int = 50
    """Optimizer steps between training states; the last step always has one."""
    wandb: str = "auto"
    """auto | online | offline | disabled; auto is online with a key, else offline."""

    def __post_init__(self) -> None:
        for name in ("epochs", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not self.name or "/" in self.name:
            raise ValueError(f"name must be a folder name without '/', got {self.name!r}")
        if self.batch.tokens_per_micro_batch < self.data.max_tokens:
            raise ValueError(
                f"batch.tokens_per_micro_batch={self.batch.tokens_per_micro_batch} cannot hold a conversation of "
                f"data.max_tokens={self.data.max_tokens}; raise the one or lower the other"
            )
        if self.wandb not in ("auto", "online", "offline", "disabled"):
            raise ValueError(f"wandb must be auto, online, offline or disabled, got {self.wandb!r}")
