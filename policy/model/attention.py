"""CSA2 attention of one layer: window keys of its own, selected entries of a shared cache, one sink.

One latent is key and value. Shapes: Q rows of the layer's half, R rows of the encoder half, H heads, C head channels,
W window, K selected entries, G output groups. Source: report section 2.3; model paper section 7.
"""

import torch
from torch import nn

from burnish.kernels.attention.reference import sink_attention_ref
from burnish.kernels.quant.reference import fake_fp8, fake_nvfp4
from burnish.kernels.tile.reference import linear
from burnish.policy.config import LayerMode, LayerPlan, ModelConfig
from burnish.policy.model.compressor import Compressor
from burnish.policy.model.indexer import Indexer, Selection
from burnish.policy.model.layers import Linear, RMSNorm
from burnish.policy.model.rope import inverse_frequencies, rotate, rotations
from burnish.policy.model.rows import KVStore, Rows


class Attention(nn.Module):
    """Released names: wq_a, q_norm, wq_b, wkv, kv_norm, attn_sink, wo_a, wo_b, compressor.*, indexer.*"""

    def __init__(self, config: ModelConfig, plan: LayerPlan, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        heads, channels = config.num_attention_heads, config.head_dim
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, dtype)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, dtype)
        self.wq_b = Linear(config.q_lora_rank, heads * channels, dtype)
        self.wkv = Linear(config.hidden_size, channels, dtype)
        self.kv_norm = RMSNorm(channels, config.rms_norm_eps, dtype)
        self.attn_sink = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.wo_a = Linear(heads * channels // config.o_groups, config.o_groups * config.o_lora_rank, dtype)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, config.hidden_size, dtype)
        self._frequency: torch.Tensor | None = None
        if plan.mode is LayerMode.full:
            self.compressor = Compressor(config, plan.layer, dtype)
        if plan.mode in (LayerMode.full, LayerMode.reindex):
            self.indexer = Indexer(config, plan, dtype)

    def _rotations(self, position: torch.Tensor) -> torch.Tensor:
        if self._frequency is None or self._frequency.device != position.device:
            frequency = inverse_frequencies(self.config, compressed=self.plan.ratio > 0)
            self._frequency = frequency.to(position.device)
        return rotations(position, self._frequency)

    def write_entries(self, x: torch.Tensor, store: KVStore, tiled: bool) -> None:
        """A Full layer's key-value work for the encoder half's rows `x` [R, D]: entries and index keys."""
        latent, position = self.compressor(x, store, tiled)
        rotation = self._rotations(position)
        # both products come from the latent before rotation and rounding
        key = self.indexer.key(latent, rotation, tiled)
        store.write_global(self.plan.layer, fake_nvfp4(rotate(latent, rotation)), key)

    def forward(
        self, x: torch.Tensor, rows: Rows, store: KVStore, state: Selection | None, tiled: bool
    ) -> tuple[torch.Tensor, Selection | None]:
        """Attend.

        Args:
            x: [Q, D] normed input of the rows of this layer's half (entries are written before this call).
            state: the selection published below.

        Returns:
            [Q, D], zero on padding rows, and the selection that the layers above read.
        """
        config, plan = self.config, self.plan
        half = rows.decoder if plan.layer >= config.decoder_start else rows.encoder
        position = rows.position[half.index]
        rotation = self._rotations(position)
        heads, channels = config.num_attention_heads, config.head_dim
        query_latent = self.q_norm(self.wq_a(x, tiled))
        query = rotate(self.wq_b(query_latent, tiled).unflatten(-1, (heads, channels)), rotation)
        own = fake_fp8(rotate(self.kv_norm(self.wkv(x, tiled)), rotation))
        keys, valid = store.window(plan.layer, own)
        if plan.ratio:
            if plan.mode is not LayerMode.reuse:
                visible = torch.where(rows.live[half.index], (position + 1) // plan.ratio, 0)
                context = rows.context[half.index]
                state = self.indexer(query_latent, x, rotation, visible, context, store, state, tiled)
            assert state is not None, f"layer {plan.layer} reads a selection that no layer published"
            entries = store.gather_main(plan.layer, state.indices)
            keys = torch.cat((keys, entries.to(keys.dtype)), 1)
            valid = torch.cat((valid, state.indices >= 0), 1)
        out = sink_attention_ref(query, keys, valid, self.attn_sink, channels**-0.5)
        out = rotate(out, rotation, inverse=True)
        groups = out.flatten(1).unflatten(-1, (config.o_groups, -1))
        weight = self.wo_a.weight.unflatten(0, (config.o_groups, config.o_lora_rank))
        mixed = [linear(groups[:, g].contiguous(), weight[g], tiled) for g in range(config.o_groups)]
        out = self.wo_b(torch.cat(mixed, -1), tiled)
        return out * rows.live[half.index].unsqueeze(-1), state
