"""Rotary positions: plain for layers without compression, frequency-only YaRN for the others.

Adjacent channel pairs of the last `qk_rope_head_dim` channels rotate as complex numbers, in fp32; no attention
temperature. Shapes: R rows, P = rope dim / 2 pairs.
"""

import math

import torch

from burnish.policy.config import ModelConfig


def inverse_frequencies(config: ModelConfig, compressed: bool) -> torch.Tensor:
    """[P] fp32 frequencies of one layer kind.

    Args:
        compressed: the layer has a compression ratio (base `compress_rope_theta` with YaRN), for queries, window keys,
            entries and index heads alike.
    """
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not compressed:
        return frequency
    yarn = config.rope_scaling

    def correction(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequency / yarn.factor * ramp + frequency * (1 - ramp)


def rotations(position: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """Unit complex factors [R, P] (complex64) of positions [R]."""
    angle = position.to(torch.float32).unsqueeze(-1) * frequency
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: torch.Tensor, rotation: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate the tail of `x` [R, ..., C] by `rotation` [R, P]; `inverse` turns back. Same shape and dtype."""
    tail = 2 * rotation.shape[-1]
    head, rest = x[..., :-tail], x[..., -tail:]
    pairs = torch.view_as_complex(rest.float().unflatten(-1, (-1, 2)).contiguous())
    factor = rotation.conj() if inverse else rotation
    factor = factor.view(factor.shape[0], *([1] * (x.dim() - 2)), factor.shape[1])
    turned = torch.view_as_real(pairs * factor).flatten(-2).to(x.dtype)
    return torch.cat((head, turned), -1)
