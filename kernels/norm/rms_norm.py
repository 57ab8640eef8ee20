"""RMSNorm over the last axis: one pass forward, one pass backward.

Shapes: N rows, D channels. Twin: kernels/norm/reference.py::rms_norm_ref.
"""

import torch
import triton
import triton.language as tl

from burnish.kernels.dispatch import num_multiprocessors, use_reference
from burnish.kernels.norm.reference import rms_norm_ref

_ELEMENTS = 8192
"""Values a program holds at once."""


@triton.jit
def _rms_norm_fwd_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, N, D, eps, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    mask = (row < N)[:, None] & (d < D)[None, :]
    at = row[:, None] * D + d[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N, BLOCK_D]
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    # in fp64 the mean is the same for every tile and order, so that fused kernels and this one agree bit by bit
    wide = x.to(tl.float64)
    mean = (tl.sum(wide * wide, 1) / D).to(tl.float32)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(y_ptr + at, (w[None, :] * (x * rstd[:, None])).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < N)


@triton.jit
def _rms_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    # a program takes every num_programs-th block of rows and keeps its share of dw
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(program * BLOCK_N, N, num_programs * BLOCK_N):
        row = start + tl.arange(0, BLOCK_N).to(tl.int64)
        mask = (row < N)[:, None] & (d < D)[None, :]
        at = row[:, None] * D + d[None, :]
        rstd = tl.load(rstd_ptr + row, mask=row < N, other=0.0)[:, None]
        x_hat = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dw += dy * x_hat
        dx_hat = dy * w[None, :]
        dx = (dx_hat - x_hat * (tl.sum(dx_hat * x_hat, 1) / D)[:, None]) * rstd
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + program.to(tl.int64) * D + d, tl.sum(dw, 0), mask=d < D)


def _blocks(d: int) -> dict[str, int]:
    block_d = triton.next_power_of_2(d)
    block_n = max(1, min(32, _ELEMENTS // 2 // block_d))
    return {"BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": min(16, max(4, block_n * block_d // 1024))}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        num_rows, size = x_ND.shape
        y_ND = torch.empty_like(x_ND)
        rstd_N = torch.empty(num_rows, device=x_ND.device, dtype=torch.float32)
        blocks = _blocks(size)
        grid = (triton.cdiv(num_rows, blocks["BLOCK_N"]),)
        if num_rows:
            _rms_norm_fwd_kernel[grid](x_ND, weight_D, y_ND, rstd_N, num_rows, size, eps, **blocks)
        ctx.save_for_backward(x_ND, weight_D, rstd_N)
        return y_ND

    @staticmethod
    def backward(ctx, dy_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_ND, weight_D, rstd_N = ctx.saved_tensors
        num_rows, size = x_ND.shape
        blocks = _blocks(size)
        # the number of partial sums depends on the device alone, so equal inputs give equal bits
        programs = max(1, min(4 * num_multiprocessors(x_ND), triton.cdiv(num_rows, blocks["BLOCK_N"])))
        dx_ND = torch.empty_like(x_ND)
        dw_PD = torch.empty(programs, size, device=x_ND.device, dtype=torch.float32)
        _rms_norm_bwd_kernel[(programs,)](
            dy_ND.contiguous(), x_ND, weight_D, rstd_N, dx_ND, dw_PD, num_rows, size, **blocks
        )
        return dx_ND, dw_PD.sum(0).to(weight_D.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of `x` to unit RMS, then by `weight`.

    Args:
        x: [..., D], any float dtype; accumulation is fp32.
        weight: [D].
        eps: added to the mean square.

    Returns:
        [..., D] in `x.dtype`.

    Raises:
        ValueError: `weight` is not [D].
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight must be {tuple(x.shape[-1:])} to match x, got {tuple(weight.shape)}")
    if use_reference(x):
        return rms_norm_ref(x, weight, eps)
    return _RMSNorm.apply(x.contiguous().view(-1, x.shape[-1]), weight, eps).view_as(x)
