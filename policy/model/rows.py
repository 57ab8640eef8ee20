"""Rows: what the one forward of serving and training runs over, and the store it reads keys from.

A row is one token of one context at one position, with a window floor. Each half of the model (encoder, decoder) has
its own chains: rows that share one live window state. A position may have several rows (a replayed one, a later
epoch); the decoder half may run on a subset of the rows (narrowing). Source: system paper, section 4.
Shapes: R rows, Q rows of one half, W window, C latent channels, D index channels, N new entries, K selected entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from burnish.kernels.tile.reference import TILE


@dataclass(kw_only=True)
class HalfRows:
    """The rows one half runs, in order, and where their windows end."""

    index: torch.Tensor
    """[Q] int64, row number in `Rows` of each row of this half."""
    chain: torch.Tensor
    """[Q] int64, chain of each row; -1 for padding."""
    floor: torch.Tensor
    """[Q] int64, first position of the chain that may be read."""


@dataclass(kw_only=True)
class Rows:
    """Flattened rows of one forward."""

    token_id: torch.Tensor
    """[R] int64."""
    position: torch.Tensor
    """[R] int64, 0-based within the context."""
    context: torch.Tensor
    """[R] int64, index of the context in the store."""
    live: torch.Tensor
    """[R] bool, False for padding rows: no keys, no writes, no experts."""
    writes_global: torch.Tensor
    """[R] bool, False below the write floor (replay rows)."""
    encoder: HalfRows
    decoder: HalfRows

    def __len__(self) -> int:
        return self.token_id.shape[0]

    @property
    def decoder_is_all(self) -> bool:
        """The decoder half runs on every row, in order (no narrowing)."""
        index = self.decoder.index
        # a narrowed half may be padded to the same length, so the length alone says nothing
        return len(index) == len(self) and torch.equal(index, torch.arange(len(self), device=index.device))

    def to(self, device: torch.device | str) -> "Rows":
        """The same rows on `device`."""

        def move(value: torch.Tensor) -> torch.Tensor:
            return value.to(device)

        halves = {
            name: HalfRows(index=move(half.index), chain=move(half.chain), floor=move(half.floor))
            for name, half in (("encoder", self.encoder), ("decoder", self.decoder))
        }
        return Rows(
            token_id=move(self.token_id),
            position=move(self.position),
            context=move(self.context),
            live=move(self.live),
            writes_global=move(self.writes_global),
            **halves,
        )


def build_rows(
    token_id: Sequence[int],
    position: Sequence[int],
    context: Sequence[int],
    *,
    writes_global: Sequence[bool] | None = None,
    encoder_chain: Sequence[int] | None = None,
    encoder_floor: Sequence[int] | None = None,
    decoder_rows: Sequence[int] | None = None,
    decoder_chain: Sequence[int] | None = None,
    decoder_floor: Sequence[int] | None = None,
    pad: bool = True,
) -> Rows:
    """Rows from plain lists; every half is padded to a multiple of 16 rows when `pad`.

    Args:
        token_id, position, context: one value a row.
        writes_global: default all True.
        encoder_chain, decoder_chain: default the context (one chain a context).
        encoder_floor, decoder_floor: default 0.
        decoder_rows: row numbers the decoder half runs on, default all.
        pad: what the deterministic mode needs; padding rows of the decoder half are padding rows of the encoder half.

    Raises:
        ValueError: lists of different lengths, a decoder row that does not exist or is named twice.
    """
    num_rows = len(token_id)
    columns = {"position": position, "context": context, "writes_global": writes_global}
    columns |= {"encoder_chain": encoder_chain, "encoder_floor": encoder_floor}
    for name, values in columns.items():
        if values is not None and len(values) != num_rows:
            raise ValueError(f"rows: {name} has {len(values)} values, token_id has {num_rows}")
    if decoder_rows is None:
        decoder_rows = range(num_rows)
    elif wrong := [row for row in decoder_rows if not 0 <= row < num_rows]:
        raise ValueError(f"rows: decoder_rows names row {wrong[0]}, there are {num_rows}")
    elif len(set(decoder_rows)) != len(decoder_rows):
        raise ValueError(f"rows: decoder_rows names a row twice: {list(decoder_rows)}")
    num_decoder = len(decoder_rows)
    for name, values in {"decoder_chain": decoder_chain, "decoder_floor": decoder_floor}.items():
        if values is not None and len(values) != num_decoder:
            raise ValueError(f"rows: {name} has {len(values)} values, the decoder half has {num_decoder} rows")
    if decoder_chain is None:
        decoder_chain = [context[row] for row in decoder_rows]
    extra = -num_rows % TILE if pad else 0
    extra_decoder = -num_decoder % TILE if pad else 0
    if extra_decoder and not extra:
        extra = TILE  # a decoder padding row needs a dead encoder row to come from

    def column(values: Sequence, fill: int | bool, extra: int) -> torch.Tensor:
        return torch.tensor([*values, *([fill] * extra)], dtype=torch.bool if isinstance(fill, bool) else torch.int64)

    encoder = HalfRows(
        index=torch.arange(num_rows + extra),
        chain=column(context if encoder_chain is None else encoder_chain, -1, extra),
        floor=column([0] * num_rows if encoder_floor is None else encoder_floor, 0, extra),
    )
    is_all = list(decoder_rows) == list(range(num_rows))
    decoder = HalfRows(
        index=encoder.index if is_all else column(decoder_rows, num_rows, extra_decoder),
        chain=column(decoder_chain, -1, extra_decoder),
        floor=column([0] * num_decoder if decoder_floor is None else decoder_floor, 0, extra_decoder),
    )
    return Rows(
        token_id=column(token_id, 0, extra),
        position=column(position, 0, extra),
        context=column(context, 0, extra),
        live=column([True] * num_rows, False, extra),
        writes_global=column([True] * num_rows if writes_global is None else writes_global, False, extra),
        encoder=encoder,
        decoder=decoder,
    )


def plain_rows(contexts: Sequence[Sequence[int]], *, pad: bool = True) -> Rows:
    """Whole contexts, each one cold prefill without narrowing: the plain layout of SFT and of the golden vectors."""
    return build_rows(
        [token for ids in contexts for token in ids],
        [position for ids in contexts for position in range(len(ids))],
        [context for context, ids in enumerate(contexts) for _ in ids],
        pad=pad,
    )


class KVStore(Protocol):
    """Where rows find their keys: in-graph tensors for the trainer, a paged cache for the engine.

    One store serves one forward. Layers are backbone layer numbers; a layer's rows are those of its half, except that
    the decoder's source layer writes entries for the encoder half's rows.
    """

    def window(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the rows' window keys and return every row's window.

        Args:
            kv: [Q, C], rounded to FP8 already.

        Returns:
            keys [Q, W, C], slot k holding position p-W+1+k of the row's chain, and valid [Q, W] bool
            (floor <= position; never a slot of another chain).
        """
        ...

    def complete_groups(
        self, layer: int, value: torch.Tensor, gate: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Stack the raw halves of the entries that these rows complete at or above the write floor.

        Args:
            value: [R, C] fp32 (ratio > 1) or compute dtype (ratio 1), of the encoder half's rows.
            gate: [R, C] fp32, None for ratio 1.

        Returns:
            value [N, ratio, C], gate [N, ratio, C] or None, position [N] of each entry's first token.
        """
        ...

    def write_global(self, layer: int, main: torch.Tensor, index_key: torch.Tensor) -> None:
        """Store the new entries in `complete_groups` order: main [N, C] (NVFP4-rounded), index_key [N, D] (MXFP4)."""
        ...

    def index_keys(self, layer: int) -> torch.Tensor:
        """Index keys of all contexts, [contexts, T, D] with T a multiple of 64, zero-filled."""
        ...

    def gather_main(self, layer: int, selected: torch.Tensor) -> torch.Tensor:
        """Main entries of each row of the current half: selected [Q, K] int64 (-1: any finite value) -> [Q, K, C].

        `layer` is the reading layer; the store finds its source.
        """
        ...
