"""The boundary between two sub-layers with gradients: the one entry for training and serving.

Twin: kernels/mhc/reference.py::boundary_ref.
"""

import torch
import triton

from burnish.kernels.dispatch import num_multiprocessors, use_reference
from burnish.kernels.mhc.boundary import (
    STREAMS,
    Boundary,
    Tiles,
    boundary_inference,
    check_boundary,
    choose_tiles,
    launch_forward,
    split_projection,
)
from burnish.kernels.mhc.boundary_backward import coefficient_gradients, launch_backward
from burnish.kernels.mhc.reference import boundary_ref


def backward_tiles(num_rows: int, size: int, multiprocessors: int, deterministic: bool) -> Tiles:
    """Tiles of the pass over the streams; with `deterministic` they do not depend on the number of rows."""
    if deterministic:
        return Tiles(block_r=16, block_d=64, splits=4, num_warps=4)
    row_tiles = triton.cdiv(num_rows, 16)
    splits = max(1, min(triton.cdiv(size, 128), 2 * multiprocessors // max(1, row_tiles)))
    return Tiles(block_r=16, block_d=64, splits=splits, num_warps=4)


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, streams, pre, post, comb, fn, base, scale, norm_eps, eps, iters, deterministic):
        num_rows, _, size = streams.shape
        multiprocessors = num_multiprocessors(streams)
        projection = split_projection(fn, streams.dtype) if fn is not None else None
        result = launch_forward(
            y, streams, pre, post, comb, projection, base, scale, norm_eps=norm_eps, eps=eps, iters=iters,
            tiles=choose_tiles(num_rows, size, multiprocessors, deterministic),
        )  # fmt: skip
        new = result.coefficients or (None, None, None)
        ctx.save_for_backward(
            y, streams, pre, post, comb, projection, base, scale, result.streams, result.raw, new[0], new[1]
        )
        ctx.options = {"norm_eps": norm_eps, "eps": eps, "iters": iters, "size": size}
        ctx.tiles = backward_tiles(num_rows, size, multiprocessors, deterministic)
        if y is None:
            # an output that is an input would lose its history
            return result.streams.view_as(streams), result.collapsed, *new
        return result.streams, result.collapsed, *new

    @staticmethod
    def backward(ctx, dstreams, dcollapsed, dpre, dpost, dcomb):
        y, streams, pre, post, comb, projection, base, scale, new_streams, raw, new_pre, new_post = ctx.saved_tensors
        coefficients = None
        if projection is not None:
            coefficients = coefficient_gradients(
                raw, base, scale, (new_pre, new_post, None), (dpre, dpost, dcomb), streams.dtype, **ctx.options
            )
        grads = launch_backward(
            y, streams, pre, post, comb, projection, new_streams, coefficients, dstreams.contiguous(),
            dcollapsed.contiguous(), ctx.tiles,
        )  # fmt: skip
        return (*grads, None, None, None, None)


def boundary(
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
    deterministic: bool = False,
) -> Boundary:
    """Expand with the old streams' (post, comb), collapse with their pre, and the new streams' coefficients.

    Args:
        y: [R, D] output of the sub-layer; None: nothing to expand (before the first one, or after an Engram module).
        streams: [R, S, D].
        pre: [R, S] fp32.
        post: [R, S] fp32, comb: [R, S, S] fp32; None without `y`.
        fn: [S*(S+2), S*D] fp32 of the next site; None: nobody needs coefficients (after the last sub-layer).
        base: [S*(S+2)], scale: [3], fp32; None without `fn`.
        norm_eps: of the one RMS statistic over S*D values.
        eps: of pre, comb and Sinkhorn.
        iters: Sinkhorn column normalisations.
        deterministic: a row's bits do not depend on the number of rows.

    Returns:
        A Boundary; gradients reach every tensor argument.

    Raises:
        ValueError: shapes do not fit.
    """
    check_boundary(y, streams, pre, fn)
    arguments = y, streams, pre, post, comb, fn, base, scale
    options = {"norm_eps": norm_eps, "eps": eps, "iters": iters}
    if use_reference(streams) or streams.shape[1] != STREAMS:
        return Boundary(*boundary_ref(*arguments, **options, tiled=deterministic))
    arguments = tuple(None if value is None else value.contiguous() for value in arguments)
    if not torch.is_grad_enabled() or not any(value is not None and value.requires_grad for value in arguments):
        return boundary_inference(*arguments, **options, deterministic=deterministic)
    return Boundary(*_Boundary.apply(*arguments, norm_eps, eps, iters, deterministic))
