"""Geometry of the caches: which layer stores what, row layouts and exact byte counts, derived from the model's config."""

from dataclasses import dataclass

from burnish.policy.config import ModelConfig
from burnish.policy.inference.config import PAGE_TOKENS


@dataclass(frozen=True, kw_only=True)
class SourceGeometry:
    """One Full layer's part of the global cache."""

    layer: int
    ratio: int
    """Tokens an entry."""
    entries_per_page: int
    """Rows of one page: main row and index row each."""


class CacheGeometry:
    """Static numbers of all caches of one model.

    Raises:
        ValueError: a compression ratio that does not divide the page.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.num_layers = config.num_hidden_layers
        self.window = config.sliding_window
        self.main_row_bytes, self.index_row_bytes = config.main_row_bytes, config.index_row_bytes
        self.window_row_bytes = config.window_row_bytes
        sources = []
        for layer in config.kv_source_layer_ids:
            ratio = config.compress_ratios[layer]
            if PAGE_TOKENS % ratio:
                raise ValueError(
                    f"engine: compression ratio {ratio} of layer {layer} must divide the page of {PAGE_TOKENS} tokens"
                )
            sources.append(SourceGeometry(layer=layer, ratio=ratio, entries_per_page=PAGE_TOKENS // ratio))
        self.sources = tuple(sources)
        self.ratios = tuple(sorted({source.ratio for source in sources}))
        """Distinct compression ratios."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all sources (56,960 in Flash)."""
        entries = sum(source.entries_per_page for source in self.sources)
        return entries * (self.main_row_bytes + self.index_row_bytes)

    @property
    def window_state_bytes(self) -> int:
        """Bytes of one context's window state: FP8 rings of all layers and raw fp32 halves of unfinished entries."""
        rings = self.num_layers * self.window * self.window_row_bytes
        halves = sum(source.ratio - 1 for source in self.sources) * 2 * 4 * self.config.head_dim
        return rings + halves

    def pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one context take."""
        return -(-num_tokens // PAGE_TOKENS)
