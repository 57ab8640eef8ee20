"""Rotary turn of the last channels of every head, out of place (with gradient) or in place.

Shapes: R rows, H heads (all axes between rows and channels), L = R * H lines, C channels, P rotated pairs.
Twin: kernels/rope/reference.py::rotate_ref.
"""

import torch
import triton
import triton.language as tl

from burnish.kernels.dispatch import use_reference
from burnish.kernels.rope.reference import rotate_ref


@triton.jit
def _rotate_kernel(
    x_ptr, rotation_ptr, y_ptr, L, H, C,
    PAIRS: tl.constexpr, INVERSE: tl.constexpr, COPY_HEAD: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    is_line = line < L
    t = tl.arange(0, 2 * PAIRS)
    tail = line[:, None] * C + (C - 2 * PAIRS) + t[None, :]
    x = tl.load(x_ptr + tail, mask=is_line[:, None], other=0.0).to(tl.float32)
    turn = tl.load(rotation_ptr + (line // H)[:, None] * (2 * PAIRS) + t[None, :], mask=is_line[:, None], other=0.0)
    a, b = tl.split(tl.reshape(x, (BLOCK_L, PAIRS, 2)))
    cos, sin = tl.split(tl.reshape(turn, (BLOCK_L, PAIRS, 2)))
    if INVERSE:
        sin = -sin
    y = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (BLOCK_L, 2 * PAIRS))
    tl.store(y_ptr + tail, y.to(y_ptr.dtype.element_ty), mask=is_line[:, None])
    if COPY_HEAD:
        c = tl.arange(0, BLOCK_C)
        mask = is_line[:, None] & (c < C - 2 * PAIRS)[None, :]
        head = line[:, None] * C + c[None, :]
        tl.store(y_ptr + head, tl.load(x_ptr + head, mask=mask), mask=mask)


def _launch(x: torch.Tensor, rotation: torch.Tensor, y: torch.Tensor, inverse: bool) -> None:
    channels, pairs = x.shape[-1], rotation.shape[-1]
    lines = x.numel() // channels
    copies = y is not x and channels > 2 * pairs
    block_c = triton.next_power_of_2(max(1, channels - 2 * pairs))
    block_l = max(1, min(64, 8192 // (block_c if copies else 2 * pairs)))
    if lines:
        _rotate_kernel[(triton.cdiv(lines, block_l),)](
            x, torch.view_as_real(rotation), y, lines, lines // x.shape[0], channels,
            PAIRS=pairs, INVERSE=inverse, COPY_HEAD=copies, BLOCK_L=block_l, BLOCK_C=block_c,
        )  # fmt: skip


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, rotation: torch.Tensor, inverse: bool) -> torch.Tensor:
        y = torch.empty_like(x)
        _launch(x, rotation, y, inverse)
        ctx.save_for_backward(rotation)
        ctx.inverse = inverse
        return y

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rotation,) = ctx.saved_tensors
        grad = grad.contiguous()
        dx = torch.empty_like(grad)
        _launch(grad, rotation, dx, not ctx.inverse)
        return dx, None, None


def _check(x: torch.Tensor, rotation: torch.Tensor) -> None:
    if rotation.dtype != torch.complex64 or rotation.dim() != 2 or rotation.shape[0] != x.shape[0]:
        raise ValueError(f"rotate: rotation must be complex64 [{x.shape[0]}, P], got {rotation.dtype} {rotation.shape}")
    if 2 * rotation.shape[1] > x.shape[-1]:
        raise ValueError(f"rotate: {rotation.shape[1]} pairs do not fit into {x.shape[-1]} channels")


def rotate(x: torch.Tensor, rotation: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Turn the last 2P channels of `x`, adjacent pairs as complex numbers.

    Args:
        x: [R, ..., C], any float dtype; the product is fp32.
        rotation: [R, P] complex64 unit factors, P a power of two on the GPU.
        inverse: turn back.

    Returns:
        A new tensor of the shape and dtype of `x`.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(x, rotation)
    if use_reference(x) or rotation.shape[1] & (rotation.shape[1] - 1):
        return rotate_ref(x, rotation, inverse)
    return _Rotate.apply(x.contiguous(), rotation.contiguous(), inverse)


def rotate_(x: torch.Tensor, rotation: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """`rotate` in place on a contiguous `x` outside of autograd: the channels before the tail are not touched."""
    _check(x, rotation)
    assert x.is_contiguous(), f"rotate_: x of shape {tuple(x.shape)} must be contiguous"
    if use_reference(x) or rotation.shape[1] & (rotation.shape[1] - 1):
        return x.copy_(rotate_ref(x, rotation, inverse))
    _launch(x, rotation.contiguous(), x, inverse)
    return x
