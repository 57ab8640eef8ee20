"""WindowPool: per-context state that does not grow. FP8 window rings of all layers, raw halves of unfinished entries.

A slot belongs to one context. A ring holds the last W positions, position p in place p % W; a step that feeds a chunk
reads the ring first and the chunk's own keys from the step, so W places are enough for any chunk.
Shapes: B slots asked for, W window, C latent channels, r compression ratio.
"""

import torch

from burnish.kernels.quant.reference import encode_fp8
from burnish.policy.inference.cache.codec import read_fp8
from burnish.policy.inference.geometry import CacheGeometry


class WindowPool:
    """State of `num_slots` contexts.

    Args:
        geometry: row layouts.
        num_slots: slots, all free at first.
        device: where the bytes live.
    """

    def __init__(self, geometry: CacheGeometry, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.geometry = geometry
        channels = geometry.config.head_dim
        self.rings = torch.zeros(
            geometry.num_layers, num_slots, geometry.window, geometry.window_row_bytes, dtype=torch.uint8, device=device
        )
        self.halves: dict[int, torch.Tensor] = {
            source.layer: torch.zeros(2, num_slots * (source.ratio - 1), channels, device=device)
            for source in geometry.sources
            if source.ratio > 1
        }
        """Full layer -> [value and gate, slots * (r-1), C] fp32; the half of position p in place p % r of its slot."""
        self._free = list(range(num_slots))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free slot. Raises IndexError when there is none: the caller makes room first."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back; what it holds is never read again before it is written."""
        assert slot not in self._free, f"window slot {slot} was freed twice"
        self._free.append(slot)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Rings of `slots` [B]: [B*W, C] fp32."""
        rows = self.rings[layer].flatten(1).index_select(0, slots)
        return read_fp8(rows.view(-1, self.geometry.window_row_bytes), self.geometry.config.head_dim)

    def write(self, layer: int, places: torch.Tensor, keys: torch.Tensor) -> None:
        """Store keys [N, C] in `places` [N] (slot * W + position % W)."""
        self.rings[layer].view(-1, self.geometry.window_row_bytes).index_copy_(0, places, encode_fp8(keys))
