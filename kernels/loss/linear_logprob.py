"""Log-probabilities and entropies of targets straight from hidden states: the logits of all tokens never exist.

Forward: every program multiplies some tokens with some of the vocabulary and keeps a running maximum, sum and mean of
its logits. Backward: the gradient of the logits, a slice of the vocabulary at a time, then two products.
Memory beside the results: a few numbers a token, and one slice in the backward.
Shapes: T tokens, D hidden, V vocabulary, S splits of the vocabulary. Twin: kernels/loss/reference.py::linear_logprob_ref.
"""

import torch
import triton
import triton.language as tl

from burnish.kernels.dispatch import num_multiprocessors, use_reference
from burnish.kernels.loss.reference import linear_logprob_ref

SLICE = 8192
"""Vocabulary entries whose logits' gradient exists at once."""


@triton.jit
def _logits(
    h_ptr, w_ptr, banned_ptr, row, v, T, D, V, inverse_temperature,
    HAS_BANNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_T, BLOCK_V] fp32, -inf outside of the distribution."""
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        h_mask, w_mask = (row < T)[:, None] & (d < D)[None, :], (v < V)[:, None] & (d < D)[None, :]
        h = tl.load(h_ptr + row.to(tl.int64)[:, None] * D + d[None, :], mask=h_mask, other=0.0)
        w = tl.load(w_ptr + v.to(tl.int64)[:, None] * D + d[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(h, tl.trans(w), acc, input_precision=PRECISION)
    is_in = v < V
    if HAS_BANNED:
        is_in = is_in & (tl.load(banned_ptr + v, mask=is_in, other=1) == 0)
    return tl.where(is_in[None, :], acc * inverse_temperature, float("-inf"))


@triton.jit
def _logprob_fwd_kernel(
    h_ptr, w_ptr, target_ptr, banned_ptr, part_ptr, T, D, V, SPAN, inverse_temperature,
    HAS_BANNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    # neighbouring programs share their slice of the head
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    target = tl.load(target_ptr + row, mask=row < T, other=-1).to(tl.int32)
    most = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    weighted = tl.zeros((BLOCK_T,), tl.float32)
    picked = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(split * SPAN, tl.minimum((split + 1) * SPAN, V), BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        z = _logits(
            h_ptr, w_ptr, banned_ptr, row, v, T, D, V, inverse_temperature, HAS_BANNED, PRECISION, BLOCK_T, BLOCK_V,
            BLOCK_D,
        )  # fmt: skip
        new = tl.maximum(most, tl.max(z, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        e, fade = tl.exp(z - shift[:, None]), tl.exp(most - shift)
        total = total * fade + tl.sum(e, 1)
        weighted = weighted * fade + tl.sum(e * tl.where(e > 0, z, 0.0), 1)
        picked += tl.sum(tl.where(v[None, :] == target[:, None], z, 0.0), 1)
        most = new
    at = part_ptr + (split.to(tl.int64) * T + row) * 4
    tl.store(at, most, mask=row < T)
    tl.store(at + 1, total, mask=row < T)
    tl.store(at + 2, weighted, mask=row < T)
    tl.store(at + 3, picked, mask=row < T)


@triton.jit
def _logit_grad_kernel(
    h_ptr, w_ptr, target_ptr, banned_ptr, lse_ptr, entropy_ptr, dlogprob_ptr, dentropy_ptr, dz_ptr,
    T, D, V, first, width, inverse_temperature,
    HAS_BANNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    v = first + column
    z = _logits(
        h_ptr, w_ptr, banned_ptr, row, v, T, D, V, inverse_temperature, HAS_BANNED, PRECISION, BLOCK_T, BLOCK_V,
        BLOCK_D,
    )  # fmt: skip
    is_row = row < T
    target = tl.load(target_ptr + row, mask=is_row, other=-1).to(tl.int32)
    lse = tl.load(lse_ptr + row, mask=is_row, other=0.0)[:, None]
    entropy = tl.load(entropy_ptr + row, mask=is_row, other=0.0)[:, None]
    dlogprob = tl.load(dlogprob_ptr + row, mask=is_row, other=0.0)[:, None]
    dentropy = tl.load(dentropy_ptr + row, mask=is_row, other=0.0)[:, None]
    p = tl.exp(z - lse)
    dz = tl.where(v[None, :] == target[:, None], dlogprob, 0.0) - dlogprob * p
    dz -= dentropy * p * (tl.where(p > 0, z, lse) - lse + entropy)
    dz = tl.where(z == float("-inf"), 0.0, dz * inverse_temperature)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=is_row[:, None] & (column < width)[None, :])


def _blocks(hidden: torch.Tensor) -> dict[str, int | str]:
    if hidden.dtype == torch.float32:
        return {"PRECISION": "ieee", "BLOCK_T": 32, "BLOCK_V": 64, "BLOCK_D": 32, "num_warps": 4, "num_stages": 2}
    return {"PRECISION": "tf32", "BLOCK_T": 128, "BLOCK_V": 256, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3}


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, banned):
        (num_tokens, size), vocabulary = hidden.shape, weight.shape[0]
        blocks = _blocks(hidden)
        token_tiles = triton.cdiv(num_tokens, blocks["BLOCK_T"])
        splits = max(1, min(triton.cdiv(vocabulary, 1024), num_multiprocessors(hidden) // token_tiles))
        span = triton.cdiv(triton.cdiv(vocabulary, splits), blocks["BLOCK_V"]) * blocks["BLOCK_V"]
        splits = triton.cdiv(vocabulary, span)
        part = torch.empty(splits, num_tokens, 4, dtype=torch.float32, device=hidden.device)
        _logprob_fwd_kernel[(token_tiles, splits)](
            hidden, weight, target, banned, part, num_tokens, size, vocabulary, span, 1.0 / temperature,
            HAS_BANNED=banned is not None, **blocks,
        )  # fmt: skip
        most, total, weighted, picked = part.unbind(-1)
        top = most.amax(0)
        fade = torch.exp(most - top)
        total, weighted = (total * fade).sum(0), (weighted * fade).sum(0)
        lse = top + total.log()
        entropy = lse - weighted / total
        ctx.save_for_backward(hidden, weight, target, banned, lse, entropy)
        ctx.temperature = temperature
        return picked.sum(0) - lse, entropy

    @staticmethod
    def backward(ctx, dlogprob, dentropy):
        hidden, weight, target, banned, lse, entropy = ctx.saved_tensors
        (num_tokens, size), vocabulary = hidden.shape, weight.shape[0]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dhidden = torch.zeros(num_tokens, size, dtype=torch.float32, device=hidden.device) if needs_hidden else None
        dweight = torch.empty_like(weight) if needs_weight else None
        dlogprob, dentropy = dlogprob.float().contiguous(), dentropy.float().contiguous()
        blocks = _blocks(hidden)
        for first in range(0, vocabulary, SLICE):
            width = min(SLICE, vocabulary - first)
            dz = torch.empty(num_tokens, width, dtype=hidden.dtype, device=hidden.device)
            grid = (triton.cdiv(num_tokens, blocks["BLOCK_T"]), triton.cdiv(width, blocks["BLOCK_V"]))
            _logit_grad_kernel[grid](
                hidden, weight, target, banned, lse, entropy, dlogprob, dentropy, dz,
                num_tokens, size, vocabulary, first, width, 1.0 / ctx.temperature,
                HAS_BANNED=banned is not None, **blocks,
            )  # fmt: skip
            if dhidden is not None:
                dhidden += dz @ weight[first : first + width]
            if dweight is not None:
                torch.mm(dz.t(), hidden, out=dweight[first : first + width])
        return None if dhidden is None else dhidden.to(hidden.dtype), dweight, None, None, None


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and the entropy of its distribution softmax(hidden . weight^T / temperature).

    Args:
        hidden: [T, D].
        weight: [V, D], same dtype; a bf16 product is exact and added in fp32.
        target: [T] int64.
        temperature: > 0.
        banned: [V] bool, ids that no distribution holds.

    Returns:
        log-probability [T] and entropy [T], fp32; gradients reach `hidden` and `weight`.

    Raises:
        ValueError: shapes do not fit, or temperature is not positive.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_logprob: hidden [T, D] and weight [V, D] expected, got {tuple(hidden.shape)}, {tuple(weight.shape)}"
        )
    if target.shape != hidden.shape[:1]:
        raise ValueError(f"linear_logprob: target must be {tuple(hidden.shape[:1])}, got {tuple(target.shape)}")
    if temperature <= 0:
        raise ValueError(f"linear_logprob: temperature must be > 0, got {temperature}")
    if use_reference(hidden) or not len(hidden):
        return linear_logprob_ref(hidden, weight, target, temperature, banned)
    if hidden.dtype != weight.dtype:
        raise ValueError(f"linear_logprob: weight must be {hidden.dtype} as hidden is, got {weight.dtype}")
    banned = None if banned is None else banned.to(torch.uint8)
    return _LinearLogprob.apply(hidden.contiguous(), weight.contiguous(), target, temperature, banned)
