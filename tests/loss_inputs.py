"""Tokens of a loss and the normaliser of a step, written down in one line: what the tests of losses start from."""

import torch

from burnish.rollout.loss_terms import LossInputs, Normaliser, Reduction

F64 = torch.float64


def values(*numbers, dtype=F64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def inputs(logprobs, behaviour=None, advantages=None, mask=None, rollout=None, dtype=F64, **more) -> LossInputs:
    lp = torch.as_tensor(logprobs, dtype=dtype).clone().requires_grad_()
    n = len(lp)
    return LossInputs(
        logprobs=lp,
        behaviour_logprobs=lp.detach().clone() if behaviour is None else torch.as_tensor(behaviour, dtype=dtype),
        advantages=torch.ones(n, dtype=dtype) if advantages is None else torch.as_tensor(advantages, dtype=dtype),
        mask=torch.ones(n, dtype=torch.bool) if mask is None else torch.as_tensor(mask, dtype=torch.bool),
        rollout=torch.zeros(n, dtype=torch.int64) if rollout is None else torch.as_tensor(rollout),
        **more,
    )


def normaliser(*tokens: int, reduction=Reduction.token_mean, max_len=0) -> Normaliser:
    return Normaliser(reduction=reduction, rollout_tokens=torch.tensor(tokens), max_len=max_len)
