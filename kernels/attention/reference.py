"""Pure-torch twins of sparse attention over gathered keys and of the indexer's scores and selections.

Shapes: R rows, H heads, C head channels, K key slots of a row (window slots first, then selected entries), T entries,
I index heads, B candidate blocks. Key and value are the same vector.
Source: DeepSeek-V4.1 report section 2.3; selection rule: higher score first, then lower index.
"""

import torch

BLOCK = 64
"""Entries scored at once: the cache page, so that a score never depends on how many entries follow it."""
_GATHER_ELEMENTS = 1 << 26


class _SinkAttention(torch.autograd.Function):
    """The formula of `sink_attention_ref` with its gradient written out: key and value are one tensor, so both of its
    gradients come from one product instead of two badly shaped ones."""

    @staticmethod
    def forward(ctx, q, keys, valid, sink, scale):
        logits = torch.bmm(q, keys.transpose(1, 2)).float() * scale
        logits = logits.masked_fill(~valid.unsqueeze(1), float("-inf"))
        column = sink.float().view(1, -1, 1).expand(logits.shape[0], -1, 1)
        full = torch.cat((logits, column), -1).softmax(-1)
        probs = full[..., :-1].to(keys.dtype)
        ctx.save_for_backward(q, keys, full)
        ctx.scale = scale
        return torch.bmm(probs, keys)

    @staticmethod
    def backward(ctx, grad):
        q, keys, full = ctx.saved_tensors
        probs = full[..., :-1]
        dprobs = torch.bmm(grad, keys.transpose(1, 2)).float()
        mean = (probs * dprobs).sum(-1, keepdim=True)
        dlogits = (probs * (dprobs - mean) * ctx.scale).to(q.dtype)
        dsink = -(full[..., -1:] * mean).sum((0, 2))
        left = torch.cat((probs.to(q.dtype), dlogits), 1)
        dkeys = torch.matmul(left.transpose(1, 2), torch.cat((grad, q), 1))
        return torch.bmm(dlogits, keys), dkeys, None, dsink, None


def sink_attention_ref(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of each row over its own key slots and one virtual key of logit `sink` and value zero.

    Args:
        q: [R, H, C].
        keys: [R, K, C].
        valid: [R, K] bool.
        sink: [H] fp32, not scaled.
        scale: factor on the dot products.

    Returns:
        [R, H, C] in q.dtype; a row without valid keys gives zeros.
    """
    return _SinkAttention.apply(q, keys, valid, sink, scale)


def index_scores_ref(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """score(p, j) = sum_h relu(q_ph . k_j) * w_ph, each row against the entries of its own context.

    Args:
        q: [R, I, D].
        weights: [R, I], scaled already.
        keys: [contexts, T, D] with T a multiple of 64 (zero-filled).
        context: [R] int64.

    Returns:
        [R, T] fp32; entries the row may not see are the caller's to mask.
    """
    num_rows, heads, channels = q.shape
    length = keys.shape[1]
    blocks = keys.view(keys.shape[0], length // BLOCK, BLOCK, channels)
    step = max(1, _GATHER_ELEMENTS // max(1, length * channels))
    out = []
    for start in range(0, num_rows, step):
        rows = slice(start, min(num_rows, start + step))
        gathered = blocks[context[rows]].flatten(0, 1)  # [r*nb, 64, D]
        queries = q[rows].unsqueeze(1).expand(-1, blocks.shape[1], -1, -1).reshape(-1, heads, channels)
        dots = torch.bmm(queries, gathered.transpose(1, 2)).relu()  # [r*nb, I, 64]
        weighted = dots * weights[rows].unsqueeze(1).expand(-1, blocks.shape[1], -1).reshape(-1, heads, 1)
        scores = weighted.float().sum(1).to(q.dtype).float()
        out.append(scores.view(-1, length))
    return torch.cat(out) if out else q.new_zeros(0, length, dtype=torch.float32)


def select_top_ref(scores: torch.Tensor, allowed: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the `k` best allowed entries of each row: score descending, then index ascending.

    Args:
        scores: [R, T] fp32.
        allowed: [R, T] bool.
        k: slots.

    Returns:
        [R, k] int64, ascending, -1 (none) last.
    """
    num_rows, length = scores.shape
    masked = scores.masked_fill(~allowed, float("-inf"))
    best, order = torch.sort(masked, dim=-1, descending=True, stable=True)
    best, order = best[:, :k], order[:, :k]
    order = torch.where(best == float("-inf"), length, order).sort(-1).values
    order = torch.where(order == length, -1, order)
    if order.shape[1] < k:
        order = torch.cat((order, order.new_full((num_rows, k - order.shape[1]), -1)), 1)
    return order


def candidate_blocks_ref(scores: torch.Tensor, visible: torch.Tensor, block: int, keep: int) -> torch.Tensor:
    """The candidate pool: the `keep` best blocks of each row, the block of the newest visible entry always among them.

    Reachability is masked before the block maximum.

    Args:
        scores: [R, T] fp32.
        visible: [R] int64, entries a row may see (the first ones).
        block: entries a block.
        keep: blocks kept at most.

    Returns:
        [R, ceil(T/block)] bool.
    """
    num_rows, length = scores.shape
    index = torch.arange(length, device=scores.device)
    masked = scores.masked_fill(index >= visible.unsqueeze(1), float("-inf"))
    pad = -length % block
    if pad:
        masked = torch.nn.functional.pad(masked, (0, pad), value=float("-inf"))
    best = masked.view(num_rows, -1, block).amax(-1)
    newest = (visible - 1).div(block, rounding_mode="floor")
    ids = torch.arange(best.shape[1], device=scores.device)
    best = best.masked_fill(ids == newest.unsqueeze(1), float("inf"))
    top, order = torch.sort(best, dim=-1, descending=True, stable=True)
    top, order = top[:, :keep], order[:, :keep]
    kept = torch.zeros_like(best, dtype=torch.bool)
    return kept.scatter(1, order, top > float("-inf"))
