"""Settings of one optimizer step and of how a batch is cut. Torch-free, so that composing a run never loads a device."""

import math
from dataclasses import dataclass
from enum import StrEnum


class OptimizerName(StrEnum):
    """Which update rule; YAML spells the member name."""

    adamw = "adamw"


class BatchError(ValueError):
    """A batch size that micro-batches and ranks cannot make up."""


def accumulation_steps(batch_size: int, micro_batch_size: int, num_ranks: int) -> int:
    """Micro-batches a rank runs for one optimizer step.

    Args:
        batch_size: sequences of one optimizer step, over all ranks.
        micro_batch_size: sequences of one micro-batch on one rank.
        num_ranks: data-parallel ranks.

    Raises:
        BatchError: `batch_size` is not a multiple; the nearest totals that are, are named. A total is never changed silently.
    """
    unit = micro_batch_size * num_ranks
    steps, rest = divmod(batch_size, unit)
    if rest == 0 and steps > 0:
        return steps
    nearest = [f"{n * unit} ({n} steps)" for n in (steps, steps + 1) if n > 0]
    raise BatchError(
        f"batch_size={batch_size} cannot be made of micro_batch_size={micro_batch_size} x num_ranks={num_ranks} = {unit} "
        f"sequences a step ({batch_size}/{unit} = {batch_size / unit:.4g}): take {' or '.join(nearest)}"
    )


@dataclass(kw_only=True)
class BatchConfig:
    """How the sequences of one optimizer step become micro-batches."""

    batch_size: int = 32
    """Sequences of one optimizer step, over all ranks."""
    micro_batch_size: int = 0
    """Sequences of one micro-batch; 0 packs as many as fit into tokens_per_micro_batch."""
    tokens_per_micro_batch: int = 2048
    """Rows of one packed micro-batch: bounds the activations in memory, never the result."""
    num_ranks: int = 1
    """Data-parallel trainer ranks; must equal the number of processes that are started."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "tokens_per_micro_batch", "num_ranks"):
            if getattr(self, name) < 1:
                raise BatchError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.micro_batch_size < 0:
            raise BatchError(f"micro_batch_size must be >= 0, got {self.micro_batch_size}")
        accumulation_steps(self.batch_size, self.micro_batch_size or 1, self.num_ranks)


@dataclass(kw_only=True)
class TrainConfig:
    """The optimizer, its schedule, and how its state is sharded."""

    optimizer: OptimizerName = OptimizerName.adamw
    lr: float = 1e-3
    """Learning rate of the stable phase."""
    lr_min_ratio: float = 0.1
    """Learning rate at the end of the decay, as a share of lr."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    decay_steps: int = 0
    """Optimizer steps of the final cosine decay; needs total_steps. 0 keeps lr constant."""
    total_steps: int = 0
    """Optimizer steps of the whole run, where the decay ends; 0 means not known (no decay). SFT fills it in."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-20
    """Added to the root of the second moment; the release trains with 1e-20."""
    weight_decay: float = 0.1
    """Decoupled; groups that must not decay (biases, sinks, embeddings, ...) ignore it."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    zero_stage: int = 1
    """DeepSpeed ZeRO: 0 replicates, 1 shards the optimizer state, 2 also the reduced gradients."""
    seed: int = 0
    """Order of data and every draw of the trainer."""
    keep_checkpoints: int = 2
    """Training states kept; older ones are removed after a newer one is complete."""

    def __post_init__(self) -> None:
        checks = {
            "lr": self.lr > 0,
            "lr_min_ratio": 0 <= self.lr_min_ratio <= 1,
            "warmup_steps": self.warmup_steps >= 0,
            "decay_steps": self.decay_steps >= 0,
            "total_steps": self.total_steps >= 0,
            "beta1": 0 <= self.beta1 < 1,
            "beta2": 0 <= self.beta2 < 1,
            "eps": self.eps > 0,
            "weight_decay": self.weight_decay >= 0,
            "grad_clip": self.grad_clip >= 0,
            "zero_stage": self.zero_stage in (0, 1, 2),
            "keep_checkpoints": self.keep_checkpoints >= 1,
        }
        for name, is_ok in checks.items():
            if not (is_ok and math.isfinite(getattr(self, name))):
                hint = " (stage 3 is not offered yet)" if name == "zero_stage" else ""
                raise ValueError(f"train.{name} is out of range: got {getattr(self, name)}{hint}")
        if self.total_steps and self.warmup_steps + self.decay_steps > self.total_steps:
            raise ValueError(
                f"train.warmup_steps + train.decay_steps = {self.warmup_steps + self.decay_steps} "
                f"is more than train.total_steps = {self.total_steps}"
            )
