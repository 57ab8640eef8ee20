"""One optimizer step through DeepSpeed: the same gradient for any number of micro-batches, ranks and ZeRO stage.

The loss of a step is (sum over all micro-batches of all ranks) / (one denominator, summed over all ranks). Gradients of
micro-batches are summed here in fp32 and enter DeepSpeed in ONE backward, whose gradient is that sum divided once.
Thereby DeepSpeed's division by accumulation steps and its averaging over ranks have nothing to act on; ranks may run
different numbers of micro-batches, or none; an expert that no row of a rank chose still gets its (zero) gradient; and
the order in which gradients reach the reduction buckets is the same on every rank, whatever the routing was.

It knows neither the model nor the loss: `forward(model, batch)` and `loss_fn(output, batch)` are the caller's.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from burnish.policy.optim.groups import param_groups
from burnish.policy.optim.schedule import learning_rate
from burnish.policy.training.config import TrainConfig
from burnish.policy.training.distributed import gather_objects, load_deepspeed
from burnish.policy.training.resume import CheckpointStore, rng_state, set_rng_state

logger = logging.getLogger(__name__)

Number = float | torch.Tensor


@dataclass(kw_only=True)
class LossSum:
    """What a loss function returns for one micro-batch."""

    loss: torch.Tensor
    """Scalar with its graph: SUM over the micro-batch's loss tokens, never a mean."""
    metrics: dict[str, tuple[Number, Number]] = field(default_factory=dict)
    """Name -> (sum, weight); logged as global sum over global weight, never as a mean of means."""


LossFn = Callable[[Any, Any], LossSum]


class _FeedGradients(torch.autograd.Function):
    """A scalar 0 whose gradient with respect to each parameter is a given tensor, times a factor."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor], factor: float, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.grads, ctx.factor = grads, factor
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        # upstream is DeepSpeed's loss scale, 1 in fp32
        return None, None, *torch._foreach_mul(ctx.grads, (upstream[0] * ctx.factor).item())


class _GradientEntry(nn.Module):
    """The module DeepSpeed trains: holds the model, and its forward takes finished gradients in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, grads: list[torch.Tensor], factor: float) -> torch.Tensor:
        return _FeedGradients.apply(grads, factor, *(p for p in self.model.parameters() if p.requires_grad))


class TrainStep:
    """Owns a model's optimizer state. Life cycle: construct, `load` or not, `step` and `save` in a loop.

    Args:
        model: trained in place; its parameters are full on every rank between steps.
        config: see TrainConfig.
        forward: model and one micro-batch -> what `loss_fn` reads; default calls the model with the batch.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, forward: Callable[[Any, Any], Any] | None = None) -> None:
        deepspeed = load_deepspeed()
        self.model, self.config = model, config
        self.forward = forward or (lambda module, batch: module(batch))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.num_steps = 0
        """Optimizer steps applied so far."""
        self.num_skipped = 0
        """Steps skipped for a non-finite loss or gradient."""
        groups = param_groups(model, config)
        if not groups:
            raise ValueError("the model has no trainable parameter")
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
        self.engine, *_ = deepspeed.initialize(
            model=_GradientEntry(model), optimizer=optimizer, config=_deepspeed_config(config, model, self.world)
        )
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._grads = [torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for p in self.parameters]

    def step(self, micro_batches: Sequence[Any], loss_fn: LossFn, *, denominator: float) -> dict[str, float]:
        """Apply one optimizer step. Every rank calls it, with as many micro-batches as it has (none is allowed).

        Args:
            micro_batches: this rank's share.
            loss_fn: output and micro-batch -> LossSum.
            denominator: this rank's share of the one denominator; the sum over ranks divides everything once.

        Returns:
            Global metrics: those of `loss_fn`, and train/loss, grad_norm, lr, denominator, step_skipped, skipped_steps.
            A step whose loss or gradient is not finite anywhere changes no weight and no optimizer state, on all ranks.
        """
        torch._foreach_zero_(self._grads)
        sums: dict[str, tuple[float, float]] = {}
        loss_sum = 0.0
        for batch in micro_batches:
            result = loss_fn(self.forward(self.model, batch), batch)
            if result.loss.requires_grad:  # a micro-batch without loss tokens may have no graph
                self._accumulate(result.loss)
            loss_sum += float(result.loss.detach())
            for name, (value, weight) in result.metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(value), before[1] + float(weight))
        is_finite = math.isfinite(loss_sum) and all(torch.isfinite(n) for n in torch._foreach_norm(self._grads))
        shares = gather_objects((loss_sum, float(denominator), is_finite, sums))
        total = sum(share[1] for share in shares)
        if not total > 0:
            raise ValueError(f"the step has no loss tokens: its denominator over all ranks is {total}")
        metrics = reduce_metrics([share[3] for share in shares])
        metrics["train/loss"] = sum(share[0] for share in shares) / total
        metrics["train/denominator"] = total
        metrics["train/lr"] = learning_rate(self.config, self.num_steps)
        metrics["train/grad_norm"] = self._apply(total, metrics["train/lr"]) if all(s[2] for s in shares) else math.nan
        is_skipped = not math.isfinite(metrics["train/grad_norm"])
        self.num_steps += not is_skipped
        self.num_skipped += is_skipped
        if is_skipped:
            bad = [rank for rank, share in enumerate(shares) if not share[2]]
            logger.warning("Skipped optimizer step %d: non-finite loss or gradient (ranks %s)", self.num_steps, bad)
        return metrics | {"train/step_skipped": float(is_skipped), "train/skipped_steps": float(self.num_skipped)}

    def save(self, directory: Path, *, extra: dict[str, Any] | None = None) -> Path:
        """Write a complete training state `step-N` under `directory`, atomically; returns its folder. All ranks call it.

        Args:
            directory: checkpoint store; older states beyond `keep_checkpoints` are removed.
            extra: JSON values that belong to the state, such as the data cursor.
        """
        store = CheckpointStore(directory, keep=self.config.keep_checkpoints)
        folder = store.begin(self.num_steps)
        self.engine.save_checkpoint(str(folder), tag="deepspeed", save_latest=False)
        torch.save(rng_state(), folder / f"rng-rank{self.rank}.pt")
        facts = {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "world": self.world,
            "zero_stage": self.config.zero_stage,
            "extra": extra or {},
        }
        return store.commit(self.num_steps, facts)

    def load(self, directory: Path) -> dict[str, Any] | None:
        """Restore the newest state under `directory` exactly, random generators included; returns its `extra`.

        None when there is no complete state.

        Raises:
            CheckpointError: a file that is damaged or missing (named), or another number of ranks or ZeRO stage.
        """
        store = CheckpointStore(directory, keep=self.config.keep_checkpoints)
        folder = store.latest()
        if folder is None:
            return None
        facts = store.verify(folder, world=self.world, zero_stage=self.config.zero_stage)
        self.engine.load_checkpoint(str(folder), tag="deepspeed")
        set_rng_state(torch.load(folder / f"rng-rank{self.rank}.pt", weights_only=False))
        self.num_steps, self.num_skipped = facts["num_steps"], facts["num_skipped"]
        logger.info("Resumed training state %s", folder)
        return facts["extra"]

    def forget(self, directory: Path, since: int) -> None:
        """Remove the training states of step `since` and later; what is loaded stays."""
        CheckpointStore(directory, keep=self.config.keep_checkpoints).remove_from(since)

    def _accumulate(self, loss: torch.Tensor) -> None:
        grads = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = [(total, grad) for total, grad in zip(self._grads, grads, strict=True) if grad is not None]
        torch._foreach_add_([total for total, _ in pairs], [grad.float() for _, grad in pairs])

    def _apply(self, total: float, lr: float) -> float:
        """Hand the summed gradients over and step; returns the global gradient norm before clipping, or a non-finite one."""
        optimizer = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        self.engine.backward(self.engine(self._grads, 1.0 / total))
        if self.config.zero_stage == 0:
            norm = torch.linalg.vector_norm(
                torch.stack(torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None]))
            ).item()
            if not math.isfinite(norm):
                self.engine.zero_grad()
                return norm
            self.engine.step()
            return norm
        skipped = self.engine.skipped_steps
        self.engine.step()
        return math.inf if self.engine.skipped_steps > skipped else float(optimizer._global_grad_norm)


def reduce_metrics(shares: Sequence[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Sum of sums over sum of weights, by name; a metric without weight anywhere is left out."""
    totals: dict[str, tuple[float, float]] = {}
    for share in shares:
        for name, (value, weight) in share.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + value, before[1] + weight)
    return {name: value / weight for name, (value, weight) in totals.items() if weight}


def _deepspeed_config(config: TrainConfig, model: nn.Module, world: int) -> dict[str, Any]:
    # buckets are allocated at start: no larger than the model, or 2 GB of zeros are the first thing a tiny run does
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bucket = min(500_000_000, -(-weights // 16) * 16)  # DeepSpeed asks for a multiple of its alignment
    return {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",  # one denominator has divided already
        "gradient_clipping": config.grad_clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
    }
