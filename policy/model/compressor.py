"""Compressor of a Full layer: normed hidden rows -> latents of compressed entries.

Ratio 1: norm(wkv x). Ratio r: per-channel softmax over the r tokens of wgate x weighs wkv x, in fp32, then the norm.
Groups are anchored at the context's start; an unfinished group emits nothing. Source: report section 2.3.
"""

import torch
from torch import nn

from burnish.policy.config import ModelConfig
from burnish.policy.model.layers import Linear, RMSNorm
from burnish.policy.model.rows import KVStore


class Compressor(nn.Module):
    """wkv [C, D], wgate [C, D] (ratio > 1), norm [C]; projections are kept in fp32."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.layer, self.ratio = layer, config.compress_ratios[layer]
        self.wkv = Linear(config.hidden_size, config.head_dim, torch.float32)
        if self.ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, torch.float32)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    def forward(self, x: torch.Tensor, store: KVStore, tiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents of the entries these rows complete.

        Args:
            x: [R, D] normed hidden of the encoder half's rows.

        Returns:
            latent [N, C] in x.dtype, un-rotated and un-quantised; position [N] of each entry's first token.
        """
        if self.ratio == 1:
            value, gate = self.wkv(x, tiled).to(x.dtype), None
        else:
            value, gate = self.wkv(x.float(), tiled), self.wgate(x.float(), tiled)
        value, gate, position = store.complete_groups(self.layer, value, gate)
        pooled = value.squeeze(1) if gate is None else (gate.softmax(1) * value).sum(1).to(x.dtype)
        return self.norm(pooled), position
