"""Settings of supervised fine-tuning. Torch-free, so that composing a run loads no device."""

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.training.config import BatchConfig, TrainConfig

MAX_THREADS = 1024


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
    more: list[str] = field(default_factory=list)
    """Further files; all conversations of all files are drawn alike."""
    format: DataFormat = DataFormat.auto
    max_tokens: int = 1024
    """Longest conversation, in tokens."""
    on_overflow: OnOverflow = OnOverflow.error
    """error | drop (counted) | truncate (the first max_tokens tokens stay; what is lost is counted)."""
    validation_path: str = ""
    """Conversations that are only scored, in the same format; empty scores none."""
    validation_more: list[str] = field(default_factory=list)
    """Further files of those."""
    validation_limit: int = 0
    """First conversations of each of these files only; 0 takes all."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"data.max_tokens must be >= 2, got {self.max_tokens}")
        if self.validation_more and not self.validation_path:
            raise ValueError("data.validation_more needs data.validation_path, and it is empty")
        if self.validation_limit < 0:
            raise ValueError(f"data.validation_limit must be >= 0, got {self.validation_limit}")


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
    """Times every conversation is trained on, at most where `stop_at_loss` is set."""
    stop_at_loss: float = 0.0
    """Validation loss, in nats a token, at which the decay begins and with it the end; 0 trains all epochs."""
    validate_every: int = 0
    """Optimizer steps between measurements of the validation loss; 0 measures with each training state."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(lr=2e-3, warmup_steps=10))
    """Learning rate schedule and optimizer; total_steps is filled in, and decay_steps=0 decays over the last fifth."""
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    checkpoint_every: int = 50
    """Optimizer steps between training states; the last step always has one."""
    threads: int = 0
    """CPU threads of torch; 0 takes torch's own choice. On a busy machine 1 is much faster."""
    wandb: str = "auto"
    """auto | online | offline | disabled; auto is online with a key, else offline."""

    def __post_init__(self) -> None:
        for name in ("epochs", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("stop_at_loss", "validate_every"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("stop_at_loss", "validate_every"):
            if getattr(self, name) and not self.data.validation_path:
                raise ValueError(f"{name}={getattr(self, name)} needs data.validation_path, and it is empty")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 0 to {MAX_THREADS}, got {self.threads}")
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ValueError(f"name must be a folder name without '/', got {self.name!r}")
        if self.batch.tokens_per_micro_batch < self.data.max_tokens:
            raise ValueError(
                f"batch.tokens_per_micro_batch={self.batch.tokens_per_micro_batch} cannot hold a conversation of "
                f"data.max_tokens={self.data.max_tokens}; raise the one or lower the other"
            )
        if self.wandb not in ("auto", "online", "offline", "disabled"):
            raise ValueError(f"wandb must be auto, online, offline or disabled, got {self.wandb!r}")


class PretrainKind(StrEnum):
    """What a policy is pre-trained on; YAML spells the member name."""

    recall = "recall"
    """Generated documents that say random words twice: taking words from the context, and nothing of any domain."""
    text = "text"
    """Plain text from a file; every token is a target."""


@dataclass(kw_only=True)
class RecallConfig:
    """Recall documents: how often each layout is drawn, as shares of their sum, and how long they are."""

    repeat: float = 1.0
    """Words, a marker, the words again."""
    turn: float = 1.0
    """A chat turn that says the user's words again."""
    lookup: float = 1.0
    """Words, then one of them as a cue for the words that followed it, several times."""
    min_words: int = 8
    """Fewest words that are shown first, in tokens."""
    max_words: int = 24
    """Most words that are shown first, in tokens."""

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in ("repeat", "turn", "lookup")}
        if min(shares.values()) < 0 or not sum(shares.values()) > 0:
            raise ValueError(f"data.recall: shares of layouts must be >= 0 and not all 0, got {shares}")
        if not 2 <= self.min_words <= self.max_words:
            raise ValueError(
                f"data.recall: expected 2 <= min_words <= max_words, got {self.min_words} and {self.max_words}"
            )

    @property
    def max_tokens(self) -> int:
        """No document is longer: words twice, their markers, and a lookup's last span."""
        return 2 * self.max_words + 8


@dataclass(kw_only=True)
class PretrainDataConfig:
    """What the documents are."""

    kind: PretrainKind = PretrainKind.recall
    """recall | text."""
    recall: RecallConfig = field(default_factory=RecallConfig)
    path: str = ""
    """kind=text: a .jsonl file (one JSON object a line) or a .parquet file whose field `text` holds a document."""
    max_tokens: int = 512
    """kind=text: longest context; a longer document becomes several, and no token is lost."""

    def __post_init__(self) -> None:
        if (self.kind is PretrainKind.text) != bool(self.path):
            raise ValueError(f"data.path goes with data.kind=text, got data.kind={self.kind} and {self.path!r}")
        if self.max_tokens < 2:
            raise ValueError(f"data.max_tokens must be >= 2, got {self.max_tokens}")


@dataclass(kw_only=True)
class PretrainRun:
    """burnish pretrain: teach a policy to take words from its context, or plain text, before it learns any task."""

    data: PretrainDataConfig = field(default_factory=PretrainDataConfig)
    policy: str = MISSING
    """Policy folder to start from, such as a fresh one of `burnish init`."""
    out: str = MISSING
    """Folder of the run; the trained policy is its `policy` folder. The same command goes on with it."""
    steps: int = 1000
    """Optimizer steps."""
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(batch_size=12, tokens_per_micro_batch=1024))
    """batch_size counts documents."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(lr=2e-3, warmup_steps=20))
    """Learning rate schedule and optimizer; total_steps is filled in, and decay_steps=0 decays over the last third."""
    evaluate_every: int = 100
    """Optimizer steps between measurements of recall on a fixed held-out set; the last step always has one."""
    num_heldout: int = 64
    """Recall documents of the held-out set, whatever the policy is trained on."""
    checkpoint_every: int = 200
    """Optimizer steps between training states; the last step always has one."""
    threads: int = 0
    """CPU threads of torch; 0 takes torch's own choice. On a busy machine 1 is much faster."""
    wandb: str = "auto"
    """auto | online | offline | disabled; auto is online with a key, else offline."""

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "num_heldout", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 0 to {MAX_THREADS}, got {self.threads}")
        longest = self.data.max_tokens if self.data.kind is PretrainKind.text else self.data.recall.max_tokens
        if self.batch.tokens_per_micro_batch < longest:
            raise ValueError(
                f"batch.tokens_per_micro_batch={self.batch.tokens_per_micro_batch} cannot hold a document of "
                f"{longest} tokens; raise it or shorten the documents"
            )
        if self.wandb not in ("auto", "online", "offline", "disabled"):
            raise ValueError(f"wandb must be auto, online, offline or disabled, got {self.wandb!r}")
