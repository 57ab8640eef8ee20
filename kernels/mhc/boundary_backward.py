"""Gradients of the boundary between two sub-layers: coefficients first, then one pass over the streams, then fn.

The new streams are recomputed from what the forward read; Sinkhorn is run again with its totals kept in a scratch of
156 values a row, and walked back by multiplying with them. Every sum has a fixed order.
Shapes: R rows, S = 4 streams, D channels, P = 24 coefficients. Twin: kernels/mhc/reference.py::boundary_ref by autograd.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from burnish.kernels.mhc.boundary import (
    COLUMNS,
    STREAMS,
    Tiles,
    _four,
    _load_projection,
    _mix,
    _store_streams,
)


@triton.jit
def _softmax_row(logits):
    e = tl.exp(logits - tl.max(logits, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def _normalize_columns(m0, m1, m2, m3, eps):
    total = m0 + m1 + m2 + m3 + eps
    return m0 / total, m1 / total, m2 / total, m3 / total


@triton.jit
def _row_step(m, total_ptr, is_row, eps):
    """One row normalisation that keeps its total."""
    total = tl.sum(m, 1) + eps
    tl.store(total_ptr, total, mask=is_row)
    return m / total[:, None]


@triton.jit
def _row_back(grad, m, total_ptr, is_row):
    """(gradient before, m before) of a row normalisation."""
    total = tl.load(total_ptr, mask=is_row, other=1.0)[:, None]
    return (grad - tl.sum(grad * m, 1)[:, None]) / total, m * total


@triton.jit
def _store_logit_gradient(side_ptr, high_ptr, low_ptr, row, mask, dlogit, raw, rstd, scale, R, first: tl.constexpr):
    """Keep one group of four: gradient of base, of scale, and of fn . X' in two halves. Returns sum of d(u) raw."""
    k = tl.arange(0, 4)
    at = row[:, None] * 32 + first + k[None, :]
    tl.store(side_ptr + at, dlogit, mask=mask)
    tl.store(side_ptr + R.to(tl.int64) * 32 + at, dlogit * raw * rstd[:, None], mask=mask)
    draw = dlogit * scale * rstd[:, None]
    high = draw.to(high_ptr.dtype.element_ty)
    low = (draw - high.to(tl.float32)).to(high_ptr.dtype.element_ty)
    at = row[:, None] * 64 + first + k[None, :]
    tl.store(high_ptr + at, high, mask=mask)
    tl.store(high_ptr + at + 32, high, mask=mask)
    tl.store(low_ptr + at, low, mask=mask)
    return tl.sum(dlogit * scale * raw, 1)


@triton.jit
def _coefficients_bwd_kernel(
    raw_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, dpre_ptr, dpost_ptr, dcomb_ptr, total_ptr,
    side_ptr, high_ptr, low_ptr, pull_ptr, R, num_values, norm_eps, eps, ITERS, BLOCK_R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < R
    k = tl.arange(0, 4)
    mask = is_row[:, None] & (k < 4)[None, :]
    at = row[:, None] * 32 + k[None, :]
    square = tl.load(raw_ptr + row * 32 + 24, mask=is_row, other=1.0)
    rstd = tl.rsqrt(square / num_values + norm_eps)
    scale0, scale1, scale2 = tl.load(scale_ptr), tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
    # forward again, totals kept
    u0, u1 = tl.load(raw_ptr + at + 8, mask=mask, other=0.0), tl.load(raw_ptr + at + 12, mask=mask, other=0.0)
    u2, u3 = tl.load(raw_ptr + at + 16, mask=mask, other=0.0), tl.load(raw_ptr + at + 20, mask=mask, other=0.0)
    sigma = rstd[:, None] * scale2
    soft0 = _softmax_row(tl.load(base_ptr + 8 + k)[None, :] + u0 * sigma)
    soft1 = _softmax_row(tl.load(base_ptr + 12 + k)[None, :] + u1 * sigma)
    soft2 = _softmax_row(tl.load(base_ptr + 16 + k)[None, :] + u2 * sigma)
    soft3 = _softmax_row(tl.load(base_ptr + 20 + k)[None, :] + u3 * sigma)
    m0, m1, m2, m3 = soft0 + eps, soft1 + eps, soft2 + eps, soft3 + eps
    totals = total_ptr + row * (2 * ITERS - 1) * 4
    tl.store(totals[:, None] + k[None, :], m0 + m1 + m2 + m3 + eps, mask=mask)
    m0, m1, m2, m3 = _normalize_columns(m0, m1, m2, m3, eps)
    for step in range(1, ITERS):
        kept = totals + (2 * step - 1) * 4
        m0, m1 = _row_step(m0, kept, is_row, eps), _row_step(m1, kept + 1, is_row, eps)
        m2, m3 = _row_step(m2, kept + 2, is_row, eps), _row_step(m3, kept + 3, is_row, eps)
        tl.store(kept[:, None] + 4 + k[None, :], m0 + m1 + m2 + m3 + eps, mask=mask)
        m0, m1, m2, m3 = _normalize_columns(m0, m1, m2, m3, eps)
    tl.debug_barrier()
    # back
    at16 = row[:, None] * 16 + k[None, :]
    g0, g1 = tl.load(dcomb_ptr + at16, mask=mask, other=0.0), tl.load(dcomb_ptr + at16 + 4, mask=mask, other=0.0)
    g2, g3 = tl.load(dcomb_ptr + at16 + 8, mask=mask, other=0.0), tl.load(dcomb_ptr + at16 + 12, mask=mask, other=0.0)
    for back in range(ITERS):
        step = ITERS - 1 - back
        kept = totals + 2 * step * 4
        total = tl.load(kept[:, None] + k[None, :], mask=mask, other=1.0)
        inner = g0 * m0 + g1 * m1 + g2 * m2 + g3 * m3
        g0, g1, g2, g3 = (g0 - inner) / total, (g1 - inner) / total, (g2 - inner) / total, (g3 - inner) / total
        m0, m1, m2, m3 = m0 * total, m1 * total, m2 * total, m3 * total
        if step > 0:
            kept -= 4
            g0, m0 = _row_back(g0, m0, kept, is_row)
            g1, m1 = _row_back(g1, m1, kept + 1, is_row)
            g2, m2 = _row_back(g2, m2, kept + 2, is_row)
            g3, m3 = _row_back(g3, m3, kept + 3, is_row)
    g0, g1 = soft0 * (g0 - tl.sum(g0 * soft0, 1)[:, None]), soft1 * (g1 - tl.sum(g1 * soft1, 1)[:, None])
    g2, g3 = soft2 * (g2 - tl.sum(g2 * soft2, 1)[:, None]), soft3 * (g3 - tl.sum(g3 * soft3, 1)[:, None])
    at4 = row[:, None] * 4 + k[None, :]
    s = tl.load(pre_ptr + at4, mask=mask, other=0.0) - eps
    dlogit = tl.load(dpre_ptr + at4, mask=mask, other=0.0) * s * (1.0 - s)
    raw = tl.load(raw_ptr + at, mask=mask, other=0.0)
    pull = _store_logit_gradient(side_ptr, high_ptr, low_ptr, row, mask, dlogit, raw, rstd, scale0, R, 0)
    s = 0.5 * tl.load(post_ptr + at4, mask=mask, other=0.0)
    dlogit = tl.load(dpost_ptr + at4, mask=mask, other=0.0) * 2.0 * s * (1.0 - s)
    raw = tl.load(raw_ptr + at + 4, mask=mask, other=0.0)
    pull += _store_logit_gradient(side_ptr, high_ptr, low_ptr, row, mask, dlogit, raw, rstd, scale1, R, 4)
    pull += _store_logit_gradient(side_ptr, high_ptr, low_ptr, row, mask, g0, u0, rstd, scale2, R, 8)
    pull += _store_logit_gradient(side_ptr, high_ptr, low_ptr, row, mask, g1, u1, rstd, scale2, R, 12)
    pull += _store_logit_gradient(side_ptr, high_ptr, low_ptr, row, mask, g2, u2, rstd, scale2, R, 16)
    pull += _store_logit_gradient(side_ptr, high_ptr, low_ptr, row, mask, g3, u3, rstd, scale2, R, 20)
    # through the statistic: d rstd / d x' = -rstd^3 x' / num_values
    tl.store(pull_ptr + row, -pull * rstd * rstd * rstd / num_values, mask=is_row)


@triton.jit
def _through_fn(
    high, low, w_ptr, start, D, HAS_LOW: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradient of fn . X' brought back to each stream, [BLOCK_R, BLOCK_D] each."""
    w = _load_projection(w_ptr, start, D, BLOCK_D)
    back = tl.dot(high, w, input_precision=PRECISION)
    if HAS_LOW:
        back = tl.dot(low, w, back)
    even, odd = tl.split(tl.reshape(back, (BLOCK_R, BLOCK_D, 2, 2)))
    g0, g2 = tl.split(even)
    g1, g3 = tl.split(odd)
    return g0, g1, g2, g3


@triton.jit
def _load_four(ptr, at, D, mask):
    """One tile of each stream, fp32."""
    a = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(ptr + at + D, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(ptr + at + 2 * D, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(ptr + at + 3 * D, mask=mask, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def _turn(g0, g1, g2, g3, c0, c1, c2, c3):
    """Weighted sum of the four gradients, a weight a row."""
    return c0[:, None] * g0 + c1[:, None] * g1 + c2[:, None] * g2 + c3[:, None] * g3


@triton.jit
def _add_products(s0, s1, s2, s3, g, x0, x1, x2, x3):
    """Row sums of g times each input."""
    return s0 + tl.sum(g * x0, 1), s1 + tl.sum(g * x1, 1), s2 + tl.sum(g * x2, 1), s3 + tl.sum(g * x3, 1)


@triton.jit
def _store_four(ptr, is_row, s0, s1, s2, s3):
    """Partial sums of four neighbouring columns."""
    tl.store(ptr, s0, mask=is_row)
    tl.store(ptr + 1, s1, mask=is_row)
    tl.store(ptr + 2, s2, mask=is_row)
    tl.store(ptr + 3, s3, mask=is_row)


@triton.jit
def _boundary_bwd_kernel(
    x_ptr, y_ptr, pre_ptr, post_ptr, comb_ptr, w_ptr, high_ptr, low_ptr, pull_ptr, dout_ptr, dz_ptr,
    dx_ptr, dy_ptr, part_ptr, R, D, SPAN,
    HAS_EXPAND: tl.constexpr, HAS_COEF: tl.constexpr, HAS_LOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(1)
    is_row = row < R
    a0, a1, a2, a3 = _four(pre_ptr, row, is_row, 4, 0)
    zero = tl.zeros((BLOCK_R,), tl.float32)
    dpre0, dpre1, dpre2, dpre3 = zero, zero, zero, zero
    if HAS_EXPAND:
        p0, p1, p2, p3 = _four(post_ptr, row, is_row, 4, 0)
        c00, c01, c02, c03 = _four(comb_ptr, row, is_row, 16, 0)
        c10, c11, c12, c13 = _four(comb_ptr, row, is_row, 16, 4)
        c20, c21, c22, c23 = _four(comb_ptr, row, is_row, 16, 8)
        c30, c31, c32, c33 = _four(comb_ptr, row, is_row, 16, 12)
        d00, d10, d20, d30, d01, d11, d21, d31 = zero, zero, zero, zero, zero, zero, zero, zero
        d02, d12, d22, d32, d03, d13, d23, d33 = zero, zero, zero, zero, zero, zero, zero, zero
        dp0, dp1, dp2, dp3 = zero, zero, zero, zero
    if HAS_COEF:
        column = tl.arange(0, 64)
        pull = tl.load(pull_ptr + row, mask=is_row, other=0.0)[:, None]
        halves = row[:, None] * 64 + column[None, :]
        high = tl.load(high_ptr + halves, mask=is_row[:, None], other=0.0)
        low = high
        if HAS_LOW:
            low = tl.load(low_ptr + halves, mask=is_row[:, None], other=0.0)
    for start in range(split * SPAN, tl.minimum((split + 1) * SPAN, D), BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = is_row[:, None] & (d < D)[None, :]
        at = row[:, None] * (4 * D) + d[None, :]
        at_y = row[:, None] * D + d[None, :]
        x0, x1, x2, x3 = _load_four(x_ptr, at, D, mask)
        n0, n1, n2, n3 = x0, x1, x2, x3
        if HAS_EXPAND:
            y = tl.load(y_ptr + at_y, mask=mask, other=0.0).to(tl.float32)
            n0 = _mix(x0, x1, x2, x3, y, c00, c10, c20, c30, p0).to(x_ptr.dtype.element_ty).to(tl.float32)
            n1 = _mix(x0, x1, x2, x3, y, c01, c11, c21, c31, p1).to(x_ptr.dtype.element_ty).to(tl.float32)
            n2 = _mix(x0, x1, x2, x3, y, c02, c12, c22, c32, p2).to(x_ptr.dtype.element_ty).to(tl.float32)
            n3 = _mix(x0, x1, x2, x3, y, c03, c13, c23, c33, p3).to(x_ptr.dtype.element_ty).to(tl.float32)
        dz = tl.load(dz_ptr + at_y, mask=mask, other=0.0).to(tl.float32)
        dpre0, dpre1, dpre2, dpre3 = _add_products(dpre0, dpre1, dpre2, dpre3, dz, n0, n1, n2, n3)
        g0, g1, g2, g3 = _load_four(dout_ptr, at, D, mask)
        g0, g1, g2, g3 = g0 + a0[:, None] * dz, g1 + a1[:, None] * dz, g2 + a2[:, None] * dz, g3 + a3[:, None] * dz
        if HAS_COEF:
            f0, f1, f2, f3 = _through_fn(high, low, w_ptr, start, D, HAS_LOW, PRECISION, BLOCK_R, BLOCK_D)
            g0, g1, g2, g3 = g0 + pull * n0 + f0, g1 + pull * n1 + f1, g2 + pull * n2 + f2, g3 + pull * n3 + f3
        if HAS_EXPAND:
            d00, d10, d20, d30 = _add_products(d00, d10, d20, d30, g0, x0, x1, x2, x3)
            d01, d11, d21, d31 = _add_products(d01, d11, d21, d31, g1, x0, x1, x2, x3)
            d02, d12, d22, d32 = _add_products(d02, d12, d22, d32, g2, x0, x1, x2, x3)
            d03, d13, d23, d33 = _add_products(d03, d13, d23, d33, g3, x0, x1, x2, x3)
            dp0, dp1, dp2, dp3 = _add_products(dp0, dp1, dp2, dp3, y, g0, g1, g2, g3)
            dy = _turn(g0, g1, g2, g3, p0, p1, p2, p3)
            tl.store(dy_ptr + at_y, dy.to(dy_ptr.dtype.element_ty), mask=mask)
            g0, g1, g2, g3 = (
                _turn(g0, g1, g2, g3, c00, c01, c02, c03),
                _turn(g0, g1, g2, g3, c10, c11, c12, c13),
                _turn(g0, g1, g2, g3, c20, c21, c22, c23),
                _turn(g0, g1, g2, g3, c30, c31, c32, c33),
            )
        _store_streams(dx_ptr, at, D, mask, g0, g1, g2, g3)
    part = part_ptr + (split.to(tl.int64) * R + row) * 32
    _store_four(part, is_row, dpre0, dpre1, dpre2, dpre3)
    if HAS_EXPAND:
        _store_four(part + 4, is_row, dp0, dp1, dp2, dp3)
        _store_four(part + 8, is_row, d00, d01, d02, d03)
        _store_four(part + 12, is_row, d10, d11, d12, d13)
        _store_four(part + 16, is_row, d20, d21, d22, d23)
        _store_four(part + 20, is_row, d30, d31, d32, d33)


@triton.jit
def _projection_grad_kernel(
    n_ptr, high_ptr, low_ptr, dfn_ptr, R, D4, HAS_LOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # columns 0..31 of high are the high half; those of low are the low half
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    p = tl.arange(0, 32)
    acc = tl.zeros((BLOCK_D, 32), tl.float32)
    for start in range(0, R, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R).to(tl.int64)
        is_row = row < R
        n = tl.load(n_ptr + row[:, None] * D4 + d[None, :], mask=is_row[:, None] & (d < D4)[None, :], other=0.0)
        n = tl.trans(n)
        at = row[:, None] * 64 + p[None, :]
        acc = tl.dot(n, tl.load(high_ptr + at, mask=is_row[:, None], other=0.0), acc, input_precision=PRECISION)
        if HAS_LOW:
            acc = tl.dot(n, tl.load(low_ptr + at, mask=is_row[:, None], other=0.0), acc)
    mask = (d < D4)[:, None] & (p < 24)[None, :]
    tl.store(dfn_ptr + p[None, :].to(tl.int64) * D4 + d[:, None], acc, mask=mask)


class Gradients(NamedTuple):
    """Gradients of the boundary's inputs; None for what was not an input."""

    y: torch.Tensor | None
    streams: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor | None
    comb: torch.Tensor | None
    fn: torch.Tensor | None
    base: torch.Tensor | None
    scale: torch.Tensor | None


class CoefficientGradients(NamedTuple):
    """What the pass over the streams needs of the coefficients' gradients."""

    high: torch.Tensor
    """[R, 64] d(fn . X'), high half twice."""
    low: torch.Tensor
    """[R, 64], low half, then zeros."""
    pull: torch.Tensor
    """[R] factor on X', from the RMS statistic."""
    side: torch.Tensor
    """[2, R, 32]: gradient of the logits, and times u."""


def coefficient_gradients(
    raw: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    *,
    size: int,
    norm_eps: float,
    eps: float,
    iters: int,
) -> CoefficientGradients:
    """Back through sigmoid, Sinkhorn and the statistic of `raw` [R, 32]."""
    num_rows, device = raw.shape[0], raw.device
    high = torch.zeros(num_rows, 2 * COLUMNS, device=device, dtype=dtype)
    low = torch.zeros(num_rows, 2 * COLUMNS, device=device, dtype=dtype)
    pull = torch.empty(num_rows, device=device, dtype=torch.float32)
    side = torch.zeros(2, num_rows, COLUMNS, device=device, dtype=torch.float32)
    totals = torch.empty(num_rows, 2 * iters - 1, STREAMS, device=device, dtype=torch.float32)
    block = 32
    if num_rows:
        _coefficients_bwd_kernel[(triton.cdiv(num_rows, block),)](
            raw, base, scale, new[0], new[1], *(grad.contiguous() for grad in grads), totals,
            side, high, low, pull, num_rows, STREAMS * size, norm_eps, eps, iters, BLOCK_R=block, num_warps=1,
        )  # fmt: skip
    return CoefficientGradients(high, low, pull, side)


def launch_backward(
    y: torch.Tensor | None,
    streams: torch.Tensor,
    pre: torch.Tensor,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    projection: torch.Tensor | None,
    new_streams: torch.Tensor,
    coefficients: CoefficientGradients | None,
    dstreams: torch.Tensor,
    dcollapsed: torch.Tensor,
    tiles: Tiles,
) -> Gradients:
    """Run the pass over the streams and the product for fn; `coefficients` is None when the boundary made none."""
    num_rows, _, size = streams.shape
    device, is_wide = streams.device, streams.dtype == torch.float32
    dx = torch.empty_like(streams)
    dy = torch.empty_like(y) if y is not None else None
    part = torch.empty(tiles.splits, num_rows, COLUMNS, device=device, dtype=torch.float32)
    span = triton.cdiv(triton.cdiv(size, tiles.splits), tiles.block_d) * tiles.block_d
    precision = "ieee" if is_wide else "tf32"
    high, low, pull = coefficients[:3] if coefficients is not None else (None, None, None)
    if num_rows:
        _boundary_bwd_kernel[(triton.cdiv(num_rows, tiles.block_r), tiles.splits)](
            streams, y, pre, post, comb, projection, high, low, pull, dstreams, dcollapsed, dx, dy, part,
            num_rows, size, span, HAS_EXPAND=y is not None, HAS_COEF=coefficients is not None, HAS_LOW=not is_wide,
            PRECISION=precision, BLOCK_R=tiles.block_r, BLOCK_D=tiles.block_d, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages, maxnreg=tiles.max_registers,
        )  # fmt: skip
    total = part.sum(0)
    dfn = dbase = dscale = None
    if coefficients is not None:
        dfn = torch.zeros(STREAMS * (STREAMS + 2), STREAMS * size, device=device, dtype=torch.float32)
        block_d = 128
        if num_rows:
            _projection_grad_kernel[(triton.cdiv(STREAMS * size, block_d),)](
                new_streams, high, low, dfn, num_rows, STREAMS * size, HAS_LOW=not is_wide, PRECISION=precision,
                BLOCK_R=64, BLOCK_D=block_d, num_warps=4, num_stages=4,
            )  # fmt: skip
        dbase, weighted = coefficients.side.sum(1)[:, : STREAMS * (STREAMS + 2)]
        dscale = torch.stack((weighted[:4].sum(), weighted[4:8].sum(), weighted[8:].sum()))
    return Gradients(
        y=dy,
        streams=dx,
        pre=total[:, :4].contiguous(),
        post=total[:, 4:8].contiguous() if y is not None else None,
        comb=total[:, 8:24].reshape(num_rows, STREAMS, STREAMS) if y is not None else None,
        fn=dfn,
        base=dbase,
        scale=dscale,
    )
