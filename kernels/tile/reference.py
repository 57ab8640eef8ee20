"""Matrix products whose result for a row does not depend on the other rows: the deterministic mode's linear algebra.

Plain fp32 products change most elements with the number of rows. Here rows go through fixed tiles of 16 (padded with
zeros), each an identical batched product, so that an engine's mixed batch and a trainer's long row give equal bits.
Shapes: R rows, T = ceil(R/16) tiles, D in, O out, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

TILE = 16


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Run CPU operations on one thread if `wanted`.

    An element-wise operation cuts its elements into one range a thread; a range that ends inside a vector computes its
    last elements with scalar code, whose exponentials and products round otherwise. The cuts depend on the number of
    rows, so with three or more threads (measured) a row's bits would depend on its batch.
    """
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """[R, ...] -> [ceil(R/16)*16, ...], zero-filled."""
    pad = -x.shape[0] % TILE
    if pad == 0:
        return x
    return torch.cat((x, x.new_zeros(pad, *x.shape[1:])))


def linear(x: torch.Tensor, weight: torch.Tensor, tiled: bool) -> torch.Tensor:
    """`x @ weight.T`.

    Args:
        x: [R, D].
        weight: [O, D], same dtype.
        tiled: run in 16-row tiles; a row's result is then independent of R, of its place and of its neighbours.

    Returns:
        [R, O].
    """
    if not tiled:
        return F.linear(x, weight)
    num_rows = x.shape[0]
    tiles = pad_rows(x).view(-1, TILE, x.shape[-1])
    out = torch.bmm(tiles, weight.t().unsqueeze(0).expand(tiles.shape[0], -1, -1))
    return out.reshape(-1, weight.shape[0])[:num_rows]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, tile_expert: torch.Tensor) -> torch.Tensor:
    """Each tile of rows times its own expert's weight.

    Args:
        x: [T, 16, D].
        weight: [E, O, D].
        tile_expert: [T] int64, ascending.

    Returns:
        [T, 16, O].
    """
    if weight.shape[1] * weight.shape[2] <= 1 << 16:  # copying a small weight a tile beats a loop over experts
        return torch.bmm(x, weight.index_select(0, tile_expert).transpose(1, 2))
    counts = torch.bincount(tile_expert, minlength=weight.shape[0]).tolist()
    parts = [
        torch.bmm(tiles, weight[expert].t().unsqueeze(0).expand(tiles.shape[0], -1, -1))
        for expert, tiles in enumerate(x.split(counts))
        if tiles.shape[0]
    ]
    return torch.cat(parts) if parts else x.new_empty(0, TILE, weight.shape[1])
