"""Weight swap of a live engine: checked first, then copied in place, so that a bad update changes nothing.

Knows no request: the engine drops its caches around it.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import nn


class WeightUpdateError(ValueError):
    """An update that does not fit the model: names the tensor; the engine's weights are as they were."""


def weights_digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def load_in_place(model: nn.Module, state: Mapping[str, torch.Tensor], *, digest: str | None = None) -> None:
    """Copy `state` into `model`'s parameters and buffers, same addresses.

    Args:
        model: changed only if everything fits.
        state: every tensor of `model.state_dict()`, same shapes and dtypes, all finite.
        digest: expected `weights_digest(state)`; None skips the check.

    Raises:
        WeightUpdateError: a missing, unexpected, mis-shaped or non-finite tensor, another dtype, another digest.
    """
    targets = dict(model.state_dict(keep_vars=True))
    if missing := sorted(set(targets) - set(state)):
        raise WeightUpdateError(f"weight update: tensor {missing[0]} is missing ({len(missing)} in all)")
    if unexpected := sorted(set(state) - set(targets)):
        raise WeightUpdateError(f"weight update: tensor {unexpected[0]} does not belong to this model")
    for name, target in targets.items():
        source = state[name]
        if source.shape != target.shape:
            raise WeightUpdateError(
                f"weight update: tensor {name} must be {list(target.shape)}, got {list(source.shape)}"
            )
        if source.dtype != target.dtype:
            raise WeightUpdateError(
                f"weight update: tensor {name} must be {target.dtype}, got {source.dtype}: the engine computes with "
                f"the trainer's bits and converts nothing"
            )
        if not bool(torch.isfinite(source).all()):
            raise WeightUpdateError(f"weight update: tensor {name} holds values that are not finite")
    if digest is not None and (got := weights_digest(state)) != digest:
        raise WeightUpdateError(f"weight update: digest of the tensors is {got}, expected {digest}")
    for name, target in targets.items():
        target.copy_(state[name])
