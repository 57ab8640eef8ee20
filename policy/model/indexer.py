"""Lightning indexer: which entries of the shared cache a query attends to, and the two-level candidate pool.

The selection is discrete: no gradient passes (the indexer is trained by an objective of its own). Index keys come
from the main latent before rotation and rounding. Source: report sections 2.3.1-2.3.2.
Shapes: Q rows, I index heads, D index channels, T entries, K selected, B candidate blocks.
"""

from dataclasses import dataclass

import torch
from torch import nn

from burnish.kernels.attention.reference import candidate_blocks_ref, index_scores_ref, select_top_ref
from burnish.kernels.quant.reference import fake_mxfp4
from burnish.policy.config import LayerMode, LayerPlan, ModelConfig
from burnish.policy.model.layers import Linear, RMSNorm
from burnish.policy.model.rope import rotate
from burnish.policy.model.rows import KVStore


@dataclass(kw_only=True)
class Selection:
    """What a source layer publishes to the layers above it, for one forward."""

    indices: torch.Tensor
    """[Q, K] int64 entries of each row, ascending, -1 last."""
    candidates: torch.Tensor | None = None
    """[Q, B] bool blocks of the pool; None while every block is in it."""


class Indexer(nn.Module):
    """wq_b [I*D, q_lora], weights_proj [I, hidden]; a Full layer also owns wk [D, C] and k_norm [D]."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        self.wq_b = Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim, dtype)
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads, dtype)
        if plan.mode is LayerMode.full:
            self.wk = Linear(config.head_dim, config.index_head_dim, dtype)
            self.k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps, dtype)

    def key(self, latent: torch.Tensor, rotation: torch.Tensor, tiled: bool) -> torch.Tensor:
        """Index keys [N, D] of entry latents [N, C]."""
        return fake_mxfp4(rotate(self.k_norm(self.wk(latent, tiled)), rotation))

    @torch.no_grad()
    def forward(
        self,
        query_latent: torch.Tensor,
        x: torch.Tensor,
        rotation: torch.Tensor,
        visible: torch.Tensor,
        context: torch.Tensor,
        store: KVStore,
        state: Selection | None,
        tiled: bool,
    ) -> Selection:
        """Select for each row.

        Args:
            query_latent: [Q, q_lora], after its norm.
            x: [Q, hidden], the layer's normed input.
            rotation: [Q, P] of the rows' positions.
            visible: [Q] int64, entries a row may see (the first ones of its context).
            context: [Q] int64.
            state: the selection of the layer below, for its candidate pool.

        Returns:
            A new Selection; K is `index_topk` when tiled (fixed slots), else at most the entries there are.
        """
        config = self.config
        most = int(visible.max()) if visible.numel() else 0
        slots = config.index_topk if tiled else max(1, min(config.index_topk, most))
        is_source = self.plan.layer == config.candidate_source_layer_id
        pool = state.candidates if self.plan.pooled and state is not None else None
        wants_pool = is_source and most > config.candidate_topk_blocks * config.candidate_block_size
        # a Full layer replaces everything that was published below, the pool too
        carried = state.candidates if state is not None and self.plan.mode is LayerMode.reindex else None
        if most <= slots and pool is None and not wants_pool:
            # everything visible is selected, whatever it scores
            order = torch.arange(slots, device=visible.device).expand(visible.shape[0], -1)
            return Selection(indices=torch.where(order < visible.unsqueeze(1), order, -1), candidates=carried)
        heads, channels = config.index_n_heads, config.index_head_dim
        query = self.wq_b(query_latent, tiled).unflatten(-1, (heads, channels))
        query = fake_mxfp4(rotate(query, rotation))
        weights = self.weights_proj(x, tiled) * (channels**-0.5 * heads**-0.5)
        keys = store.index_keys(self.plan.layer)
        scores = index_scores_ref(query, weights, keys, context)
        entry = torch.arange(scores.shape[1], device=visible.device)
        allowed = entry < visible.unsqueeze(1)
        candidates = carried
        if wants_pool:
            candidates = candidate_blocks_ref(
                scores, visible, config.candidate_block_size, config.candidate_topk_blocks
            )
        if pool is not None:
            allowed = allowed & pool.repeat_interleave(config.candidate_block_size, 1)[:, : scores.shape[1]]
        return Selection(indices=select_top_ref(scores, allowed, slots), candidates=candidates)
