"""The SFT loss: negative log-likelihood of assistant tokens, summed; the train step divides once by their global count."""

from collections.abc import Sequence

import torch

from burnish.policy.model.transformer import Transformer
from burnish.policy.training.forward import Scored, score
from burnish.policy.training.packing import PackedBatch
from burnish.policy.training.step import LossSum


def nll(scored: Scored, batch: PackedBatch) -> LossSum:
    """Summed negative log-likelihood of a micro-batch; its denominator is the number of loss rows."""
    count = len(scored.row)
    return LossSum(loss=-scored.logprob.sum(), metrics={"train/entropy": (scored.entropy.sum().item(), count)})


def mean_nll(model: Transformer, batches: Sequence[PackedBatch]) -> float:
    """Mean over all loss tokens of all batches: what train/loss shows for the same batches and weights."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            scored = score(model, batch)
            total -= scored.logprob.sum().item()
            count += len(scored.row)
    if not count:
        raise ValueError("no loss token in the batches to score")
    return total / count
