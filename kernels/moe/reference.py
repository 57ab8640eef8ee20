"""Pure-torch twins of routing (`noaux_tc` over sqrt-softplus scores) and of the routed experts.

Shapes: R rows, D channels, E experts, K experts a row, F expert width, T tiles of 16 rows.
"""

import torch
import torch.nn.functional as F

from burnish.kernels.tile.reference import TILE, grouped_linear, linear


def route_ref(
    logits: torch.Tensor, bias: torch.Tensor, k: int, *, renormalize: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by score + bias, weigh by the un-biased score.

    Args:
        logits: [R, E] fp32.
        bias: [E] or [R, E] fp32, steers the choice only, no gradient.
        k: experts a row.
        renormalize: divide the chosen scores by their sum.
        scaling: factor on the weights.

    Returns:
        experts [R, K] int64 (best key first, ties to the lower id), weights [R, K] fp32.
    """
    scores = torch.sqrt(F.softplus(logits))
    order = torch.sort((scores + bias).detach(), dim=-1, descending=True, stable=True).indices[:, :k]
    return order, route_weights_ref(scores, order, renormalize=renormalize, scaling=scaling)


def route_weights_ref(
    scores: torch.Tensor, experts: torch.Tensor, *, renormalize: bool, scaling: float
) -> torch.Tensor:
    """Weights of given experts: [R, E] scores, [R, K] ids -> [R, K] fp32."""
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling


def swiglu_ref(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), fp32."""
    return F.silu(gate.float().clamp_max(limit)) * up.float().clamp(-limit, limit)


def experts_ref(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """Sum over a row's experts of w2 . (swiglu(w1 x, w3 x) * weight), in tiles of 16 rows of one expert.

    Args:
        x: [R, D].
        experts: [R, K] int64; -1: the row takes no part in that slot.
        weights: [R, K] fp32.
        w1, w3: [E, F, D]; w2: [E, D, F].
        limit: SwiGLU clamp.

    Returns:
        [R, D] fp32, added in slot order.
    """
    num_rows, k = experts.shape
    flat = experts.flatten()
    live = torch.nonzero(flat >= 0).squeeze(1)
    slots = live[torch.sort(flat[live], stable=True).indices]  # slot ids (row*K + slot), grouped by expert
    counts = torch.bincount(flat[live], minlength=w1.shape[0])
    tiles = (counts + TILE - 1) // TILE
    tile_expert = torch.repeat_interleave(torch.arange(w1.shape[0], device=x.device), tiles)
    first_tile, first_slot = tiles.cumsum(0) - tiles, counts.cumsum(0) - counts
    expert = flat[slots]
    place = first_tile[expert] * TILE + torch.arange(slots.numel(), device=x.device) - first_slot[expert]
    packed = x.new_zeros(tile_expert.numel() * TILE, x.shape[-1]).index_copy(0, place, x.index_select(0, slots // k))
    packed = packed.view(-1, TILE, x.shape[-1])
    scale = weights.new_zeros(packed.shape[0] * TILE).index_copy(0, place, weights.flatten().index_select(0, slots))
    hidden = swiglu_ref(grouped_linear(packed, w1, tile_expert), grouped_linear(packed, w3, tile_expert), limit)
    hidden = (hidden * scale.view(-1, TILE, 1)).to(x.dtype)
    out = grouped_linear(hidden, w2, tile_expert).flatten(0, 1)
    gathered = out.new_zeros(num_rows * k, x.shape[-1]).index_copy(0, slots, out.index_select(0, place))
    return gathered.view(num_rows, k, -1).float().sum(1)


def shared_expert_ref(
    x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor, limit: float, tiled: bool
) -> torch.Tensor:
    """The expert that every row takes: [R, D] -> [R, D] fp32."""
    hidden = swiglu_ref(linear(x, w1, tiled), linear(x, w3, tiled), limit).to(x.dtype)
    return linear(hidden, w2, tiled).float()
