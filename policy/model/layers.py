"""The two parameter holders every module is built of: a bias-free linear and an RMS norm."""

import torch
from torch import nn

from burnish.kernels.norm.reference import rms_norm_ref
from burnish.kernels.tile.reference import linear


class Linear(nn.Module):
    """Bias-free linear, weight [O, D]; `tiled` runs the deterministic product."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))

    def forward(self, x: torch.Tensor, tiled: bool) -> torch.Tensor:
        """[R, D] -> [R, O]; the product runs in the weight's dtype for fp32 islands, else in x's."""
        return linear(x.to(self.weight.dtype), self.weight, tiled)


class RMSNorm(nn.Module):
    """RMS norm over the last axis, weight [D]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D] in x.dtype."""
        return rms_norm_ref(x, self.weight, self.eps)
