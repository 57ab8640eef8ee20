"""Pure-torch twin of RMSNorm: the definition of correct."""

import torch


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of `x` [..., D] to unit RMS, times `weight` [D] in fp32, cast to x.dtype."""
    x32 = x.float()
    return (weight.float() * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps))).to(x.dtype)
