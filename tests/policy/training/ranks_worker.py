"""Run by torchrun from test_step.py: the same global batch split over ranks, at every ZeRO stage; rank 0 writes JSON."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from burnish.policy.training.config import TrainConfig
from burnish.policy.training.distributed import shutdown
from burnish.policy.training.step import LossSum, TrainStep


def token_losses(output: torch.Tensor, batch: torch.Tensor) -> LossSum:
    """Loss c_t * w for tokens with constants c: the gradient is the mean of the constants."""
    return LossSum(loss=(output * batch).sum(), metrics={"mean": (batch.sum(), batch.numel())})


class Weight(nn.Module):
    """One weight of value 1, and one that no token uses on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(1))
        self.sometimes = nn.Parameter(torch.ones(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.used.expand_as(batch) + (0 * self.sometimes if batch.numel() > 1 else 0)


def run(stage: int, shares: list[list[list[float]]]) -> dict[str, float]:
    """One SGD-like step; `shares` holds each rank's micro-batches."""
    # beta 0 and a large eps make AdamW's first update lr * g / (|g| + eps): the weight tells the gradient
    config = TrainConfig(zero_stage=stage, lr=1.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, grad_clip=0.0)
    trainer = TrainStep(Weight(), config)
    mine = [torch.tensor(values) for values in shares[trainer.rank]]
    metrics = trainer.step(mine, token_losses, denominator=sum(b.numel() for b in mine))
    return metrics | {"weight": trainer.model.used.item(), "unused": trainer.model.sometimes.item()}


def main() -> None:
    cases = {
        "row 1": [[[1.0, 1.0, 1.0, 1.0]], [[3.0]]],
        "uneven": [[[1.0, 1.0], [1.0, 1.0]], [[3.0]]],
        "nothing on rank 1": [[[1.0, 1.0, 1.0, 1.0], [3.0]], []],
        "not finite on rank 1": [[[1.0]], [[float("nan")]]],
    }
    results = {f"{name} zero {z}": run(z, shares) for name, shares in cases.items() for z in (0, 1, 2)}
    path = Path(sys.argv[1])
    trainer = TrainStep(Weight(), TrainConfig(zero_stage=1, lr=0.1))
    share = torch.tensor([1.0, 2.0]) if trainer.rank == 0 else torch.tensor([4.0])
    trainer.step([share], token_losses, denominator=share.numel())
    trainer.save(path / "states", extra={"cursor": 7})
    after = trainer.step([share], token_losses, denominator=share.numel()) | {"weight": trainer.model.used.item()}
    again = TrainStep(Weight(), TrainConfig(zero_stage=1, lr=0.1))
    extra = again.load(path / "states")
    resumed = again.step([share], token_losses, denominator=share.numel()) | {"weight": again.model.used.item()}
    results["resume"] = {"is_same": resumed == after, "extra": extra}
    if trainer.rank == 0:
        (path / "results.json").write_text(json.dumps(results))
    shutdown()


if __name__ == "__main__":
    main()
