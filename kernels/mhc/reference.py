"""Pure-torch twins of the single-pass manifold-constrained hyper-connection.

Shapes: R rows, S residual streams, D channels. Everything is fp32 inside.
Source: DeepSeek-V4.1 report section 2.4, Eq. 6.
"""

import torch

from burnish.kernels.tile.reference import linear


def sinkhorn_ref(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Row softmax + eps, one column normalisation, then (iters-1) rounds of row then column.

    Args:
        logits: [..., S, S] fp32, row = input stream, column = output stream.
        iters: column normalisations.
        eps: added to the softmax and to every denominator.

    Returns:
        [..., S, S], nearly doubly stochastic.
    """
    mix = logits.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def coefficients_ref(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
    tiled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse, expand and mixing weights of one sub-layer site.

    Args:
        streams: [R, S, D].
        fn: [S*(S+2), S*D] fp32.
        base: [S*(S+2)] fp32.
        scale: [3] fp32, for pre, post and comb.
        norm_eps: of the one RMS statistic over all S*D values.
        eps: of pre, comb and Sinkhorn.
        iters: Sinkhorn column normalisations.
        tiled: deterministic tiles.

    Returns:
        pre [R, S], post [R, S], comb [R, S, S], fp32.
    """
    size = streams.shape[1]
    x = streams.flatten(1).float()
    u = linear(x, fn, tiled) * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
    sigma = torch.cat((scale[0].expand(size), scale[1].expand(size), scale[2].expand(size * size)))
    logits = torch.addcmul(base, u, sigma)
    pre = torch.sigmoid(logits[:, :size]) + eps
    post = 2.0 * torch.sigmoid(logits[:, size : 2 * size])
    comb = sinkhorn_ref(logits[:, 2 * size :].unflatten(-1, (size, size)), iters, eps)
    return pre, post, comb


def collapse_ref(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the streams: [R, S, D], [R, S] -> [R, D] in streams.dtype."""
    return (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


def expand_ref(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_k = post_k * y + sum_j comb[j, k] * X_j: [R, D], [R, S, D] -> [R, S, D] in streams.dtype."""
    mixed = torch.bmm(comb.transpose(1, 2), streams.float())
    return torch.addcmul(mixed, post.unsqueeze(-1), y.float().unsqueeze(1)).to(streams.dtype)
