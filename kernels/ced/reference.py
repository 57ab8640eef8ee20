"""Pure-torch twin of the key-value work of a Full layer: from a projection's output to stored main and index rows.

Shapes: N entries, C latent channels, D index channels, P rotated pairs. Source: model paper, section 8.3.
"""

import torch
import torch.nn.functional as F

from burnish.kernels.quant.reference import norm_rows_ref, write_rows_ref


def write_entries_ref(
    x: torch.Tensor,
    main: torch.Tensor,
    index: torch.Tensor,
    slots: torch.Tensor,
    rotation: torch.Tensor,
    *,
    norm: torch.Tensor,
    key: torch.Tensor,
    key_norm: torch.Tensor,
    eps: float,
    stored: bool = False,
) -> None:
    """Store entries of compressor outputs `x` [N, C]; arguments as kernels/ced/entries.py::write_entries."""
    # both products come from the latent before rotation and rounding
    latent = norm_rows_ref(x, norm, eps)
    write_rows_ref(latent, main, "nvfp4", slots=slots, rotation=rotation, stored=stored)
    index_key = F.linear(latent, key)
    write_rows_ref(index_key, index, "mxfp4", slots=slots, norm=key_norm, eps=eps, rotation=rotation, stored=stored)
