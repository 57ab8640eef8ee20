"""Pure-torch twin of the rotary turn: adjacent channel pairs of the tail as complex numbers, in fp32.

Shapes: R rows, P = rotated channels / 2 pairs, C channels.
"""

import torch


def rotate_ref(x: torch.Tensor, rotation: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate the tail of `x` [R, ..., C] by `rotation` [R, P] complex64; `inverse` turns back. Same shape and dtype."""
    tail = 2 * rotation.shape[-1]
    head, rest = x[..., :-tail], x[..., -tail:]
    pairs = torch.view_as_complex(rest.float().unflatten(-1, (-1, 2)).contiguous())
    factor = rotation.conj() if inverse else rotation
    factor = factor.view(factor.shape[0], *([1] * (x.dim() - 2)), factor.shape[1])
    turned = torch.view_as_real(pairs * factor).flatten(-2).to(x.dtype)
    return torch.cat((head, turned), -1)
