"""Pure-torch twins of the single-pass manifold-constrained hyper-connection.

Shapes: R rows, S residual streams, D channels. Everything is fp32 inside.
Source: DeepSeek-V4.1 report section 2.4, Eq. 6.
"""

import torch

from burnish.kernels.tile.reference import linear


class _Sinkhorn(torch.autograd.Function):
    """`sinkhorn_ref` on [S, S, N], rows last so that every step is one long vector operation."""

    @staticmethod
    def forward(ctx, logits, iters, eps):
        needs_trail = ctx.needs_input_grad[0]
        soft = logits.softmax(1)
        # a Python number would be made a tensor again by every one of the many small operations
        eps = logits.new_full((), eps)
        mix = soft + eps
        trail = []
        for step in range(2 * iters - 1):
            axis = step % 2  # 0: columns (sum over input streams), 1: rows
            total = mix.sum(axis, keepdim=True).add_(eps)
            if needs_trail:
                mix = mix / total
                trail += [mix, total]
            else:
                mix.div_(total)
        ctx.save_for_backward(soft, *trail)
        return mix

    @staticmethod
    def backward(ctx, grad):
        soft, *trail = ctx.saved_tensors
        for step in reversed(range(len(trail) // 2)):
            mix, total = trail[2 * step], trail[2 * step + 1]
            grad = (grad - (grad * mix).sum(step % 2, keepdim=True)) / total
        return soft * (grad - (grad * soft).sum(1, keepdim=True)), None, None


def sinkhorn_ref(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Row softmax + eps, one column normalisation, then (iters-1) rounds of row then column.

    Args:
        logits: [N, S, S] fp32, row = input stream, column = output stream.
        iters: column normalisations.
        eps: added to the softmax and to every denominator.

    Returns:
        [N, S, S], nearly doubly stochastic.
    """
    return _Sinkhorn.apply(logits.permute(1, 2, 0).contiguous(), iters, eps).permute(2, 0, 1)


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


class _Collapse(torch.autograd.Function):
    """Weighted sum of the streams; the gradient avoids a batch of outer products."""

    @staticmethod
    def forward(ctx, streams, pre):
        ctx.save_for_backward(streams, pre)
        return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)

    @staticmethod
    def backward(ctx, grad):
        streams, pre = ctx.saved_tensors
        grad = grad.float()
        dpre = torch.bmm(streams.float(), grad.unsqueeze(2)).squeeze(2)
        return (pre.unsqueeze(2) * grad.unsqueeze(1)).to(streams.dtype), dpre


class _Expand(torch.autograd.Function):
    """Mixing and expansion as one product of [comb^T | post] with the stacked streams and sub-layer output."""

    @staticmethod
    def forward(ctx, y, streams, post, comb):
        mix = torch.cat((comb.transpose(1, 2), post.unsqueeze(2)), 2)  # [R, S, S+1]
        stacked = torch.cat((streams.float(), y.float().unsqueeze(1)), 1)  # [R, S+1, D]
        ctx.save_for_backward(mix, stacked)
        ctx.dtype = streams.dtype
        return torch.bmm(mix, stacked).to(streams.dtype)

    @staticmethod
    def backward(ctx, grad):
        mix, stacked = ctx.saved_tensors
        grad = grad.float()
        dstacked = torch.bmm(mix.transpose(1, 2), grad).to(ctx.dtype)
        dmix = torch.bmm(grad, stacked.transpose(1, 2))
        return dstacked[:, -1], dstacked[:, :-1], dmix[:, :, -1], dmix[:, :, :-1].transpose(1, 2)


def collapse_ref(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the streams: [R, S, D], [R, S] fp32 -> [R, D] in streams.dtype."""
    return _Collapse.apply(streams, pre)


def expand_ref(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_k = post_k * y + sum_j comb[j, k] * X_j: [R, D], [R, S, D] -> [R, S, D] in streams.dtype."""
    return _Expand.apply(y, streams, post, comb)


def boundary_ref(
    y: torch.Tensor | None,
    streams: torch.Tensor,
    pre: torch.Tensor,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor | None,
    base: torch.Tensor | None,
    scale: torch.Tensor | None,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
    tiled: bool,
) -> tuple[torch.Tensor, ...]:
    """Everything between two sub-layers: expand with (post, comb), collapse with pre, coefficients of the new streams.

    Args:
        y: [R, D] output of the sub-layer; None: nothing to expand.
        fn: None: nobody needs coefficients (after the last sub-layer).

    Returns:
        streams [R, S, D], collapsed [R, D], then pre, post, comb of the new streams or None, None, None.
    """
    if y is not None:
        streams = expand_ref(y, streams, post, comb)
    collapsed = collapse_ref(streams, pre)
    if fn is None:
        return streams, collapsed, None, None, None
    new = coefficients_ref(streams, fn, base, scale, norm_eps=norm_eps, eps=eps, iters=iters, tiled=tiled)
    return streams, collapsed, *new
