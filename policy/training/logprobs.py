"""Log-probability of what was sampled, under what it was really sampled from: temperature and kept set.

The engine draws from softmax(logits / temperature), without the ids it never samples, restricted to the set that top-k /
top-p left. The trainer must normalise over the same set, as the engine recorded it: rebuilding it from the cut-offs gets
ties wrong. The operations are the sampler's, so that equal logits give equal bits.

Shapes: N tokens, V vocabulary, M entries of all kept sets.
"""

from collections.abc import Sequence

import torch


def distributions(
    logits_NV: torch.Tensor,
    target_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    kept_ids_M: torch.Tensor | None = None,
    kept_offsets: torch.Tensor | None = None,
    never: Sequence[int] = (),
) -> torch.Tensor:
    """Log-probabilities of what each token was sampled from.

    Args:
        target_N: int64, the sampled tokens.
        kept_ids_M: ids of all kept sets, one after the other; each holds its token's target.
        kept_offsets: [N + 1], kept set of token n is kept_ids_M[kept_offsets[n]:kept_offsets[n + 1]];
            an empty set stands for the full vocabulary.
        never: ids that the sampler leaves out of every distribution.

    Returns:
        [N, V], -inf outside the set; gradient goes into the set's logits only.

    Raises:
        ValueError: temperature is not positive, or a target lies outside its set.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0 to score tokens, got {temperature}")
    logits_NV = logits_NV / temperature if temperature != 1.0 else logits_NV
    if never:
        is_never = torch.zeros(logits_NV.shape[1], dtype=torch.bool, device=logits_NV.device)
        is_never[list(never)] = True
        if bool((wrong := is_never[target_N]).any()):
            n = int(torch.nonzero(wrong)[0])
            raise ValueError(f"token {n} has id {int(target_N[n])}, which is never sampled")
        logits_NV = logits_NV.masked_fill(is_never, -torch.inf)
    if kept_ids_M is None or kept_offsets is None:
        return torch.log_softmax(logits_NV, -1)
    counts = kept_offsets.diff()
    token_M = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    is_out = (counts == 0).unsqueeze(1).expand_as(logits_NV).logical_not().clone()
    is_out[token_M, kept_ids_M.long()] = False
    missing = torch.nonzero(is_out.gather(1, target_N.unsqueeze(1)).squeeze(1))
    if len(missing):
        n = int(missing[0])
        raise ValueError(f"token {n} (id {int(target_N[n])}) is not in its kept set of {int(counts[n])} ids")
    return torch.log_softmax(logits_NV.masked_fill(is_out, -torch.inf), -1)
