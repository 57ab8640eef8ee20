"""Pure-torch twin of the linear log-probability: head product, temperature, log-softmax, gather and entropy, in fp32.

Shapes: T tokens, D hidden, V vocabulary.
"""

import torch


def linear_logprob_ref(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and the entropy of what it was drawn from.

    Args:
        hidden: [T, D].
        weight: [V, D], the head.
        target: [T] int64.
        temperature: divides the logits.
        banned: [V] bool, ids outside of every distribution.

    Returns:
        log-probability [T] and entropy [T], fp32; a banned target has -inf.
    """
    logits = hidden.float() @ weight.float().t() / temperature
    if banned is not None:
        logits = logits.masked_fill(banned, -torch.inf)
    logprob = torch.log_softmax(logits, -1)
    entropy = -(logprob.exp() * logprob.masked_fill(logprob == -torch.inf, 0.0)).sum(-1)
    return logprob.gather(1, target.unsqueeze(1)).squeeze(1), entropy
