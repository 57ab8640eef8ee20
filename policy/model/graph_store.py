"""GraphStore: the trainer's store. Keys are tensors of the running graph, so gradients reach every key's writer.

Plain and complete for any layout of rows and chains: it is the twin that the engine's paged cache is tested against.
Shapes as in rows.py.
"""

from typing import Any

import torch

from burnish.kernels.attention.reference import BLOCK
from burnish.policy.config import ModelConfig
from burnish.policy.model.rows import HalfRows, Rows


class GraphStore:
    """One forward's keys.

    Args:
        config: the model's constants.
        rows: the layout; every chain must be whole from its floor on.

    Raises:
        ValueError: a chain, a pair or a context's entries have a hole, or two rows of a chain share a position.
    """

    def __init__(self, config: ModelConfig, rows: Rows) -> None:
        self.config, self.rows = config, rows
        self.plans = config.layers()
        device = rows.token_id.device
        self._span = int(rows.position.max()) + 1 if len(rows) else 1
        self._window_index = {
            half: self._windows(name, half_rows)
            for half, name, half_rows in ((0, "encoder", rows.encoder), (1, "decoder", rows.decoder))
        }
        self._num_contexts = int(rows.context.max()) + 1 if len(rows) else 1
        self._entries = {ratio: self._layout(ratio) for ratio in {p.ratio for p in self.plans if p.ratio}}
        self._main: dict[int, torch.Tensor] = {}
        self._index_keys: dict[int, torch.Tensor] = {}
        self._decoder_context = rows.context[rows.decoder.index]
        self._device = device

    def _half(self, layer: int) -> int:
        return int(layer >= self.config.decoder_start)

    def _lookup(self, name: str, half: HalfRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Sorted (chain, position) keys of a half's live rows and the half-row number of each."""
        live = torch.nonzero(half.chain >= 0).squeeze(1)
        keys = half.chain[live] * self._span + self.rows.position[half.index[live]]
        keys, order = keys.sort()
        if keys.numel() > 1 and bool((keys[1:] == keys[:-1]).any()):
            twice = int(keys[1:][keys[1:] == keys[:-1]][0])
            raise ValueError(
                f"rows: {name} chain {twice // self._span} has position {twice % self._span} twice; "
                f"a replayed or later row needs a chain of its own"
            )
        return keys, live[order]

    def _find(self, keys: torch.Tensor, order: torch.Tensor, wanted: torch.Tensor, what: str) -> torch.Tensor:
        """Half-row numbers of `wanted` keys (-1 stays -1)."""
        if keys.numel() == 0:
            return torch.full_like(wanted, -1)
        place = torch.searchsorted(keys, wanted.clamp_min(0)).clamp_max(keys.numel() - 1)
        missing = (keys[place] != wanted) & (wanted >= 0)
        if bool(missing.any()):
            key = int(wanted[missing][0])
            raise ValueError(
                f"rows: {what} chain {key // self._span} has no row at position {key % self._span}, which a row reads"
            )
        return torch.where(wanted >= 0, order[place], -1)

    def _windows(self, name: str, half: HalfRows) -> tuple[torch.Tensor, torch.Tensor]:
        """[Q, W] half-row numbers of every row's window, and validity."""
        keys, order = self._lookup(name, half)
        position = self.rows.position[half.index]
        offset = torch.arange(1 - self.config.sliding_window, 1, device=position.device)
        wanted = position.unsqueeze(1) + offset
        valid = (wanted >= half.floor.unsqueeze(1)) & (wanted >= 0) & (half.chain >= 0).unsqueeze(1)
        wanted = torch.where(valid, half.chain.unsqueeze(1) * self._span + wanted, -1)
        return self._find(keys, order, wanted, name).clamp_min(0), valid

    def _layout(self, ratio: int) -> dict[str, Any]:
        """Which rows make which entry of one ratio, and where the entry lies in the padded table."""
        rows = self.rows
        closing = rows.live & rows.writes_global & ((rows.position + 1) % ratio == 0)
        last = torch.nonzero(closing).squeeze(1)
        entry = rows.position[last] // ratio
        length = int(entry.max()) + 1 if entry.numel() else 0
        length += -length % BLOCK
        slot = rows.context[last] * length + entry
        if slot.numel() != slot.unique().numel():
            raise ValueError("rows: one entry is written by two rows; only one row of a position may write global KV")
        self._check_entries(ratio, rows.context[last], entry)
        members = [last]
        if ratio > 1:
            keys, order = self._lookup("encoder", rows.encoder)
            chain = rows.encoder.chain[last]
            members = [
                self._find(keys, order, chain * self._span + rows.position[last] - back, "encoder")
                for back in range(ratio - 1, 0, -1)
            ] + [last]
        return {"members": torch.stack(members, 1), "slot": slot, "length": length, "position": entry * ratio}

    def _check_entries(self, ratio: int, context: torch.Tensor, entry: torch.Tensor) -> None:
        """Every entry that some row may select is written by a row of this forward (`entry` of `context`, unique)."""
        rows = self.rows
        visible = torch.where(rows.live, (rows.position + 1) // ratio, 0)
        most = visible.new_zeros(self._num_contexts).scatter_reduce(0, rows.context, visible, "amax")
        written = torch.bincount(context, minlength=self._num_contexts)
        holes = torch.nonzero(written < most)  # the row that writes an entry sees it: never more than `most`
        if len(holes):
            wanted = int(holes[0])
            there = set(entry[context == wanted].tolist())
            missing = next(j for j in range(int(most[wanted])) if j not in there)
            raise ValueError(
                f"rows: context {wanted} has no row that writes the entry closed at position {missing * ratio + ratio - 1} "
                f"(ratio {ratio}), which later rows may select"
            )

    def window(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVStore."""
        index, valid = self._window_index[self._half(layer)]
        return kv.index_select(0, index.flatten()).unflatten(0, index.shape), valid

    def complete_groups(
        self, layer: int, value: torch.Tensor, gate: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See KVStore."""
        entries = self._entries[self.plans[layer].ratio]
        members = entries["members"]
        return value[members], None if gate is None else gate[members], entries["position"]

    def write_global(self, layer: int, main: torch.Tensor, index_key: torch.Tensor) -> None:
        """See KVStore."""
        entries = self._entries[self.plans[layer].ratio]
        size = self._num_contexts * entries["length"]
        self._main[layer] = main.new_zeros(size, main.shape[-1]).index_copy(0, entries["slot"], main)
        keys = index_key.detach()
        table = keys.new_zeros(size, keys.shape[-1]).index_copy(0, entries["slot"], keys)
        self._index_keys[layer] = table.view(self._num_contexts, entries["length"], keys.shape[-1])

    def index_keys(self, layer: int) -> torch.Tensor:
        """See KVStore."""
        return self._index_keys[self.plans[layer].kv_source]

    def gather_main(self, layer: int, selected: torch.Tensor) -> torch.Tensor:
        """See KVStore."""
        plan = self.plans[layer]
        context = self._decoder_context if self._half(layer) else self.rows.context
        table, length = self._main[plan.kv_source], self._entries[plan.ratio]["length"]
        if table.shape[0] == 0:  # no context has an entry yet
            return table.new_zeros(*selected.shape, table.shape[-1])
        flat = context.unsqueeze(1) * length + selected.clamp_min(0)
        return table.index_select(0, flat.flatten()).unflatten(0, selected.shape)
