"""One layer: attention site and MoE site, joined by single-pass hyper-connections.

The input of a site is collapsed with the coefficients of the site before it; only expand and mixing use its own.
Shapes: Q rows, S streams, D hidden. Source: report Eq. 6; model paper section 6.3.
"""

from dataclasses import dataclass

import torch
from torch import nn

from burnish.kernels.mhc.reference import coefficients_ref, collapse_ref, expand_ref
from burnish.policy.config import LayerMode, LayerPlan, ModelConfig
from burnish.policy.model.attention import Attention
from burnish.policy.model.indexer import Selection
from burnish.policy.model.layers import RMSNorm
from burnish.policy.model.moe import MoE
from burnish.policy.model.rows import KVStore, Rows


@dataclass(kw_only=True)
class Carry:
    """What passes from layer to layer for the rows of one half."""

    streams: torch.Tensor
    """[Q, S, D]."""
    pre: torch.Tensor
    """[Q, S] fp32, collapse weights computed by the site before."""
    selection: Selection | None = None
    """Published by the last index source."""


class Block(nn.Module):
    """Released names: attn_norm, attn.*, ffn_norm, ffn.*, hc_attn_{fn,base,scale}, hc_ffn_{fn,base,scale}."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attn = Attention(config, plan, dtype)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.ffn = MoE(config, dtype)
        size = config.hc_mult * (config.hc_mult + 2)
        for site in ("attn", "ffn"):
            fn = torch.empty(size, config.hc_mult * config.hidden_size, dtype=torch.float32)
            self.register_parameter(f"hc_{site}_fn", nn.Parameter(fn))
            self.register_parameter(f"hc_{site}_base", nn.Parameter(torch.zeros(size, dtype=torch.float32)))
            self.register_parameter(f"hc_{site}_scale", nn.Parameter(torch.ones(3, dtype=torch.float32)))

    def _coefficients(
        self, site: str, streams: torch.Tensor, tiled: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        fn, base, scale = (getattr(self, f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        return coefficients_ref(
            streams, fn, base, scale,
            norm_eps=config.rms_norm_eps, eps=config.hc_eps, iters=config.hc_sinkhorn_iters, tiled=tiled,
        )  # fmt: skip

    def forward(
        self, carry: Carry, rows: Rows, store: KVStore, forced: torch.Tensor | None, tiled: bool
    ) -> tuple[Carry, torch.Tensor]:
        """Run the layer.

        Args:
            carry: of the half's rows; at the decoder's first layer of the encoder half's rows, which are narrowed here
                after the layer's key-value work.
            forced: [Q, K] recorded experts or None.

        Returns:
            The carry for the layer above and the experts [Q, K].
        """
        streams, pre = carry.streams, carry.pre
        is_cut = self.plan.layer == self.config.decoder_start
        half = rows.decoder if self.plan.layer >= self.config.decoder_start else rows.encoder
        x = self.attn_norm(collapse_ref(streams, pre))
        if self.plan.mode is LayerMode.full:
            self.attn.write_entries(x, store, tiled)
        if is_cut and not rows.decoder_is_all:
            streams, x = streams[half.index], x[half.index]
        own_pre, post, comb = self._coefficients("attn", streams, tiled)
        y, selection = self.attn(x, rows, store, carry.selection, tiled)
        streams = expand_ref(y, streams, post, comb)
        next_pre, post, comb = self._coefficients("ffn", streams, tiled)
        y, experts = self.ffn(self.ffn_norm(collapse_ref(streams, own_pre)), rows.live[half.index], forced, tiled)
        streams = expand_ref(y, streams, post, comb)
        return Carry(streams=streams, pre=next_pre, selection=selection), experts
