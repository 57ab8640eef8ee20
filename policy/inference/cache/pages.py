"""PagePool: the paged global cache. Bytes of NVFP4 main rows and MXFP4 index rows, page references, the free list.

Attention and the indexer read these bytes and nothing else. A page holds 64 tokens of one context in every Full layer.
Knows no request. Shapes: N entries, C latent channels, D index channels.
"""

from collections import deque
from collections.abc import Iterable

import torch

from burnish.kernels.quant.reference import encode_mxfp4
from burnish.policy.inference.cache.codec import read_mxfp4, read_nvfp4, write_nvfp4
from burnish.policy.inference.geometry import CacheGeometry


class PagePool:
    """Storage of `num_pages` pages.

    Args:
        geometry: row layouts.
        num_pages: pages, all free at first.
        device: where the bytes live.
    """

    def __init__(self, geometry: CacheGeometry, num_pages: int, device: torch.device | str = "cpu") -> None:
        self.geometry, self.num_pages = geometry, num_pages
        self.main: dict[int, torch.Tensor] = {}
        """Full layer -> [num_pages * entries_per_page, main_row_bytes] uint8."""
        self.index: dict[int, torch.Tensor] = {}
        """Full layer -> [num_pages * entries_per_page, index_row_bytes] uint8."""
        for source in geometry.sources:
            num_rows = num_pages * source.entries_per_page
            self.main[source.layer] = torch.zeros(num_rows, geometry.main_row_bytes, dtype=torch.uint8, device=device)
            self.index[source.layer] = torch.zeros(num_rows, geometry.index_row_bytes, dtype=torch.uint8, device=device)
        self._references = [0] * num_pages
        self._free = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def size_bytes(self) -> int:
        """Bytes of the storage that attention and the indexer read."""
        return sum(table.nbytes for tables in (self.main, self.index) for table in tables.values())

    def take(self, count: int) -> list[int]:
        """`count` free pages, one reference each.

        Raises:
            ValueError: fewer are free; the caller makes room first.
        """
        if count > len(self._free):
            raise ValueError(f"page pool: asked for {count} pages, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder of live pages."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less; pages without a holder become free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} was freed twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def write(self, layer: int, rows: torch.Tensor, main: torch.Tensor, index_key: torch.Tensor) -> None:
        """Store entries in table rows [N] int64: main [N, C] NVFP4-rounded, index_key [N, D] MXFP4-rounded."""
        self.main[layer].index_copy_(0, rows, write_nvfp4(main))
        self.index[layer].index_copy_(0, rows, encode_mxfp4(index_key))

    def read_main(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Main entries [N, C] fp32 of table rows [N]."""
        return read_nvfp4(self.main[layer].index_select(0, rows), self.geometry.config.head_dim)

    def read_index(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Index keys [N, D] fp32 of table rows [N]."""
        return read_mxfp4(self.index[layer].index_select(0, rows), self.geometry.config.index_head_dim)
