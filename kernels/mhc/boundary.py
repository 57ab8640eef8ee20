"""What happens between two sub-layers: expand, collapse and the next coefficients, each stream read and written once.

X' = comb^T X + post y; z = pre . X'; then pre', post', comb' from fn . X' and one RMS statistic, with Sinkhorn fused into
the pass that adds up the partial sums. The sub-layer before computed pre, post and comb from X (single-pass mHC).
Bytes of a row: (2n + 2) D values of the streams' dtype and a few hundred of coefficients.
Shapes: R rows, S = 4 streams, D channels, P = S (S + 2) = 24 coefficients.
Twin: kernels/mhc/reference.py::boundary_ref. Source: DeepSeek-V4.1 report section 2.4, Eq. 6.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from burnish.kernels.dispatch import num_multiprocessors, use_reference
from burnish.kernels.mhc.reference import boundary_ref

STREAMS = 4
COLUMNS = 32
"""Columns of a row of partial sums: 24 products with fn, the sum of squares, padding."""


class Boundary(NamedTuple):
    """What the sub-layer after the boundary needs; None where it was not asked for."""

    streams: torch.Tensor
    """[R, S, D]."""
    collapsed: torch.Tensor
    """[R, D], the sub-layer's input before its norm."""
    pre: torch.Tensor | None
    """[R, S] fp32, collapses the streams after the next boundary."""
    post: torch.Tensor | None
    """[R, S] fp32."""
    comb: torch.Tensor | None
    """[R, S, S] fp32, row = input stream."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a launch is cut."""

    block_r: int
    """Rows of a program."""
    block_d: int
    """Channels of one step."""
    splits: int
    """Programs that share the channels of a row."""
    num_warps: int
    num_stages: int = 1
    max_registers: int | None = None
    """Of a thread; None: what the compiler likes."""


def choose_tiles(num_rows: int, size: int, multiprocessors: int, deterministic: bool) -> Tiles:
    """Tiles for `num_rows` rows of `size` channels; with `deterministic` they do not depend on the number of rows."""
    if deterministic:
        return Tiles(block_r=64, block_d=64, splits=4, num_warps=8, num_stages=3)
    if num_rows >= 16 * multiprocessors:
        row_tiles = triton.cdiv(num_rows, 64)
        splits = max(1, min(4, 2 * multiprocessors // row_tiles))
        return Tiles(block_r=64, block_d=64, splits=splits, num_warps=8, num_stages=3)
    # few rows: as many programs as keep every multiprocessor loading
    block_r, most = (16, 16) if num_rows <= 512 else (32, 8)
    splits = max(1, min(most, triton.cdiv(size, 256), 2 * multiprocessors // triton.cdiv(max(1, num_rows), block_r)))
    return Tiles(block_r=block_r, block_d=64, splits=splits, num_warps=4, num_stages=2)


@triton.jit
def _mix(x0, x1, x2, x3, y, c0, c1, c2, c3, post):
    """One output stream: [BLOCK_R, BLOCK_D] fp32."""
    return c0[:, None] * x0 + c1[:, None] * x1 + c2[:, None] * x2 + c3[:, None] * x3 + post[:, None] * y


@triton.jit
def _four(ptr, row, is_row, width: tl.constexpr, first: tl.constexpr):
    """Four neighbouring columns of a [R, width] table, each [BLOCK_R]."""
    at = ptr + row * width + first
    a, b = tl.load(at, mask=is_row, other=0.0), tl.load(at + 1, mask=is_row, other=0.0)
    c, d = tl.load(at + 2, mask=is_row, other=0.0), tl.load(at + 3, mask=is_row, other=0.0)
    return a, b, c, d


@triton.jit
def _store_streams(ptr, at, D, mask, x0, x1, x2, x3):
    """One tile of each stream."""
    tl.store(ptr + at, x0.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + at + D, x1.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + at + 2 * D, x2.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + at + 3 * D, x3.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_projection(w_ptr, start, D, BLOCK_D: tl.constexpr):
    """[64, 4 BLOCK_D]: high and low half of fn for some channels, the streams of a channel side by side."""
    p, c = tl.arange(0, 64), tl.arange(0, 4 * BLOCK_D)
    # the last 8 rows of each half are zero, and reading them would cost a quarter of the traffic
    mask = (p % 32 < 24)[:, None] & (start * 4 + c < 4 * D)[None, :]
    return tl.load(w_ptr + p[:, None] * (4 * D) + start * 4 + c[None, :], mask=mask, other=0.0)


@triton.jit
def _boundary_fwd_kernel(
    x_ptr, y_ptr, pre_ptr, post_ptr, comb_ptr, w_ptr, out_ptr, z_ptr, part_ptr, R, D, SPAN,
    HAS_EXPAND: tl.constexpr, HAS_COEF: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(1)
    is_row = row < R
    a0, a1, a2, a3 = _four(pre_ptr, row, is_row, 4, 0)
    if HAS_EXPAND:
        p0, p1, p2, p3 = _four(post_ptr, row, is_row, 4, 0)
        c00, c01, c02, c03 = _four(comb_ptr, row, is_row, 16, 0)
        c10, c11, c12, c13 = _four(comb_ptr, row, is_row, 16, 4)
        c20, c21, c22, c23 = _four(comb_ptr, row, is_row, 16, 8)
        c30, c31, c32, c33 = _four(comb_ptr, row, is_row, 16, 12)
    acc = tl.zeros((64, BLOCK_R), tl.float32)
    square = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(split * SPAN, tl.minimum((split + 1) * SPAN, D), BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = is_row[:, None] & (d < D)[None, :]
        at = row[:, None] * (4 * D) + d[None, :]
        n0 = tl.load(x_ptr + at, mask=mask, other=0.0)
        n1 = tl.load(x_ptr + at + D, mask=mask, other=0.0)
        n2 = tl.load(x_ptr + at + 2 * D, mask=mask, other=0.0)
        n3 = tl.load(x_ptr + at + 3 * D, mask=mask, other=0.0)
        if HAS_EXPAND:
            y = tl.load(y_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
            x0, x1, x2, x3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
            n0 = _mix(x0, x1, x2, x3, y, c00, c10, c20, c30, p0).to(out_ptr.dtype.element_ty)
            n1 = _mix(x0, x1, x2, x3, y, c01, c11, c21, c31, p1).to(out_ptr.dtype.element_ty)
            n2 = _mix(x0, x1, x2, x3, y, c02, c12, c22, c32, p2).to(out_ptr.dtype.element_ty)
            n3 = _mix(x0, x1, x2, x3, y, c03, c13, c23, c33, p3).to(out_ptr.dtype.element_ty)
            _store_streams(out_ptr, at, D, mask, n0, n1, n2, n3)
        # what the next site sees is the rounded stream
        x0, x1, x2, x3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        z = a0[:, None] * x0 + a1[:, None] * x1 + a2[:, None] * x2 + a3[:, None] * x3
        tl.store(z_ptr + row[:, None] * D + d[None, :], z.to(z_ptr.dtype.element_ty), mask=mask)
        if HAS_COEF:
            square += tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 1)
            # the streams are the second operand: as the first one their whole mix would be computed again in its layout
            side = tl.reshape(tl.join(tl.join(n0, n2), tl.join(n1, n3)), (BLOCK_R, 4 * BLOCK_D))
            w = _load_projection(w_ptr, start, D, BLOCK_D)
            acc = tl.dot(w, tl.trans(side), acc, input_precision=PRECISION)
    if HAS_COEF:
        column = tl.arange(0, 32)
        both = tl.sum(tl.reshape(acc, (2, 32, BLOCK_R)), 0)
        at = (split.to(tl.int64) * R + row) * 32
        tl.store(part_ptr + at[None, :] + column[:, None], both, mask=is_row[None, :] & (column != 24)[:, None])
        tl.store(part_ptr + at + 24, square, mask=is_row)


@triton.jit
def _softmax(a, b, c, d, eps):
    """Softmax over four columns, each [BLOCK_R]."""
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    scale = 1.0 / (a + b + c + d)
    return a * scale + eps, b * scale + eps, c * scale + eps, d * scale + eps


@triton.jit
def _normalize(a, b, c, d, eps):
    """Four values a row by their sum."""
    scale = 1.0 / (a + b + c + d + eps)
    return a * scale, b * scale, c * scale, d * scale


@triton.jit
def _load_columns(ptr, row, is_row, width: tl.constexpr, first: tl.constexpr, LANES: tl.constexpr):
    """Four neighbouring columns of a [R, width] table by one access a row, each [LANES]."""
    at = ptr + row[:, None] * width + first + tl.arange(0, 4)[None, :]
    even, odd = tl.split(tl.reshape(tl.load(at, mask=is_row[:, None], other=0.0), (LANES, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _store_columns(ptr, row, is_row, a, b, c, d, width: tl.constexpr, first: tl.constexpr, LANES: tl.constexpr):
    at = ptr + row[:, None] * width + first + tl.arange(0, 4)[None, :]
    tl.store(at, tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (LANES, 4)), mask=is_row[:, None])


@triton.jit
def _logits(raw_ptr, base_ptr, row, is_row, sigma, first: tl.constexpr, LANES: tl.constexpr):
    """Four neighbouring logits of each row."""
    a, b, c, d = _load_columns(raw_ptr, row, is_row, 32, first, LANES)
    at = base_ptr + first
    return (
        tl.load(at) + a * sigma,
        tl.load(at + 1) + b * sigma,
        tl.load(at + 2) + c * sigma,
        tl.load(at + 3) + d * sigma,
    )


@triton.jit
def _coefficients_kernel(
    part_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr, raw_ptr, R, num_splits, num_values, norm_eps, eps,
    ITERS, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    split, column = tl.arange(0, SPLITS), tl.arange(0, 32)
    row = first + tl.arange(0, BLOCK_R)
    mask = (row < R)[None, :, None] & (split < num_splits)[:, None, None]
    at = (split[:, None, None] * R.to(tl.int64) + row[None, :, None]) * 32 + column[None, None, :]
    raw = tl.sum(tl.load(part_ptr + at, mask=mask, other=0.0), 0)
    # through memory, and every coefficient of a row is in one thread
    tl.store(raw_ptr + row[:, None] * 32 + column[None, :], raw, mask=(row < R)[:, None])
    tl.debug_barrier()
    # a thread for each row; more threads than rows do the same again
    lane = tl.arange(0, LANES)
    row = first + lane % BLOCK_R
    is_row = row < R
    is_own = is_row & (lane < BLOCK_R)
    square = tl.load(raw_ptr + row * 32 + 24, mask=is_row, other=1.0)
    rstd = tl.rsqrt(square / num_values + norm_eps)
    a, b, c, d = _logits(raw_ptr, base_ptr, row, is_row, rstd * tl.load(scale_ptr), 0, LANES)
    a, b, c, d = tl.sigmoid(a) + eps, tl.sigmoid(b) + eps, tl.sigmoid(c) + eps, tl.sigmoid(d) + eps
    _store_columns(pre_ptr, row, is_own, a, b, c, d, 4, 0, LANES)
    a, b, c, d = _logits(raw_ptr, base_ptr, row, is_row, rstd * tl.load(scale_ptr + 1), 4, LANES)
    a, b, c, d = 2.0 * tl.sigmoid(a), 2.0 * tl.sigmoid(b), 2.0 * tl.sigmoid(c), 2.0 * tl.sigmoid(d)
    _store_columns(post_ptr, row, is_own, a, b, c, d, 4, 0, LANES)
    sigma = rstd * tl.load(scale_ptr + 2)
    m00, m01, m02, m03 = _logits(raw_ptr, base_ptr, row, is_row, sigma, 8, LANES)
    m10, m11, m12, m13 = _logits(raw_ptr, base_ptr, row, is_row, sigma, 12, LANES)
    m20, m21, m22, m23 = _logits(raw_ptr, base_ptr, row, is_row, sigma, 16, LANES)
    m30, m31, m32, m33 = _logits(raw_ptr, base_ptr, row, is_row, sigma, 20, LANES)
    m00, m01, m02, m03 = _softmax(m00, m01, m02, m03, eps)
    m10, m11, m12, m13 = _softmax(m10, m11, m12, m13, eps)
    m20, m21, m22, m23 = _softmax(m20, m21, m22, m23, eps)
    m30, m31, m32, m33 = _softmax(m30, m31, m32, m33, eps)
    for step in range(ITERS):
        if step > 0:
            m00, m01, m02, m03 = _normalize(m00, m01, m02, m03, eps)
            m10, m11, m12, m13 = _normalize(m10, m11, m12, m13, eps)
            m20, m21, m22, m23 = _normalize(m20, m21, m22, m23, eps)
            m30, m31, m32, m33 = _normalize(m30, m31, m32, m33, eps)
        m00, m10, m20, m30 = _normalize(m00, m10, m20, m30, eps)
        m01, m11, m21, m31 = _normalize(m01, m11, m21, m31, eps)
        m02, m12, m22, m32 = _normalize(m02, m12, m22, m32, eps)
        m03, m13, m23, m33 = _normalize(m03, m13, m23, m33, eps)
    _store_columns(comb_ptr, row, is_own, m00, m01, m02, m03, 16, 0, LANES)
    _store_columns(comb_ptr, row, is_own, m10, m11, m12, m13, 16, 4, LANES)
    _store_columns(comb_ptr, row, is_own, m20, m21, m22, m23, 16, 8, LANES)
    _store_columns(comb_ptr, row, is_own, m30, m31, m32, m33, 16, 12, LANES)


def split_projection(fn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fn [P, S*D] fp32 as what the kernel multiplies streams of `dtype` with: [64, D, S], high half then low half.

    With bf16 streams the two halves carry 16 bits of fn's mantissa; the products are exact and added in fp32. Make it
    once for fixed weights; a launch without it makes its own.
    """
    by_channel = fn.view(fn.shape[0], STREAMS, -1).transpose(1, 2)
    out = torch.zeros(2, COLUMNS, *by_channel.shape[1:], device=fn.device, dtype=dtype)
    out[0, : fn.shape[0]] = by_channel
    out[1, : fn.shape[0]] = by_channel - out[0, : fn.shape[0]].float()
    return out.flatten(0, 1)


class Launch(NamedTuple):
    """Results of `launch_forward`, for the autograd function."""

    streams: torch.Tensor
    collapsed: torch.Tensor
    coefficients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    raw: torch.Tensor | None
    """[R, 32] fp32: fn . X' before the statistic, the sum of squares in column 24."""


def launch_forward(
    y: torch.Tensor | None,
    streams: torch.Tensor,
    pre: torch.Tensor,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    projection: torch.Tensor | None,
    base: torch.Tensor | None,
    scale: torch.Tensor | None,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
    tiles: Tiles,
) -> Launch:
    """Run the two kernels on contiguous tensors; without `y` nothing is expanded, without `projection` no coefficients."""
    num_rows, _, size = streams.shape
    device = streams.device
    out = torch.empty_like(streams) if y is not None else streams
    z = torch.empty(num_rows, size, device=device, dtype=streams.dtype)
    part = torch.empty(
        (tiles.splits, num_rows, COLUMNS) if projection is not None else (0,), device=device, dtype=torch.float32
    )
    span = triton.cdiv(triton.cdiv(size, tiles.splits), tiles.block_d) * tiles.block_d
    if num_rows:
        _boundary_fwd_kernel[(triton.cdiv(num_rows, tiles.block_r), tiles.splits)](
            streams, y, pre, post, comb, projection, out, z, part, num_rows, size, span,
            HAS_EXPAND=y is not None, HAS_COEF=projection is not None,
            PRECISION="ieee" if streams.dtype == torch.float32 else "tf32",
            BLOCK_R=tiles.block_r, BLOCK_D=tiles.block_d, num_warps=tiles.num_warps, num_stages=tiles.num_stages, maxnreg=tiles.max_registers,
        )  # fmt: skip
    if projection is None:
        return Launch(out, z, None, None)
    new = tuple(
        torch.empty(num_rows, *shape, device=device, dtype=torch.float32)
        for shape in ((STREAMS,), (STREAMS,), (STREAMS, STREAMS))
    )
    raw = torch.empty(num_rows, COLUMNS, device=device, dtype=torch.float32)
    block = 128 if tiles.splits <= 4 and num_rows > 1024 else 8
    if num_rows:
        _coefficients_kernel[(triton.cdiv(num_rows, block),)](
            part, base, scale, *new, raw, num_rows, tiles.splits, STREAMS * size, norm_eps, eps, iters,
            SPLITS=triton.next_power_of_2(tiles.splits), BLOCK_R=block, LANES=128, num_warps=4,
        )  # fmt: skip
    return Launch(out, z, new, raw)


def check_boundary(
    y: torch.Tensor | None, streams: torch.Tensor, pre: torch.Tensor, fn: torch.Tensor | None
) -> tuple[int, int]:
    """Rows and channels of a boundary; raises ValueError where shapes do not fit."""
    if streams.dim() != 3:
        raise ValueError(f"mhc: streams must be [R, S, D], got {tuple(streams.shape)}")
    num_rows, size, channels = streams.shape
    if y is not None and y.shape != (num_rows, channels):
        raise ValueError(f"mhc: y must be {(num_rows, channels)} to match the streams, got {tuple(y.shape)}")
    if pre.shape != (num_rows, size):
        raise ValueError(f"mhc: pre must be {(num_rows, size)}, got {tuple(pre.shape)}")
    if fn is not None and fn.shape != (size * (size + 2), size * channels):
        raise ValueError(f"mhc: fn must be {(size * (size + 2), size * channels)}, got {tuple(fn.shape)}")
    return num_rows, channels


@torch.no_grad()
def boundary_inference(
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
    projection: torch.Tensor | None = None,
    deterministic: bool = False,
    tiles: Tiles | None = None,
) -> Boundary:
    """One boundary without gradients. See `burnish.kernels.mhc.single_pass.boundary` for the arguments.

    Args:
        projection: `split_projection(fn, streams.dtype)` made before.
        deterministic: a row's bits do not depend on the number of rows.
        tiles: overrides the choice, for measurements.
    """
    num_rows, size = check_boundary(y, streams, pre, fn)
    if use_reference(streams) or streams.shape[1] != STREAMS:
        return Boundary(
            *boundary_ref(
                y, streams, pre, post, comb, fn, base, scale,
                norm_eps=norm_eps, eps=eps, iters=iters, tiled=deterministic,
            )
        )  # fmt: skip
    if projection is None and fn is not None:
        projection = split_projection(fn, streams.dtype)
    tiles = tiles or choose_tiles(num_rows, size, num_multiprocessors(streams), deterministic)
    result = launch_forward(
        y, streams, pre, post, comb, projection, base, scale,
        norm_eps=norm_eps, eps=eps, iters=iters, tiles=tiles,
    )  # fmt: skip
    return Boundary(result.streams, result.collapsed, *(result.coefficients or (None, None, None)))
