"""PagedStore: the engine's KVStore. One step over a mixed batch: prefill chunks and decode rows of many contexts.

All index tensors are built once a step; the per-layer methods are gathers, a decode and a scatter, without a loop over
requests. Both halves run every row (narrowing is off), and every chain's floor is 0.
Shapes: R rows of the step (padding last), B contexts of the step, W window, N new entries, K selected entries, P pages
of a context, r compression ratio, C latent channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from burnish.kernels.attention.reference import BLOCK
from burnish.kernels.tile.reference import TILE
from burnish.policy.inference.cache.pages import PagePool
from burnish.policy.inference.cache.windows import WindowPool
from burnish.policy.inference.config import PAGE_TOKENS
from burnish.policy.model.rows import HalfRows, Rows


@dataclass(kw_only=True)
class Feed:
    """The rows of one context in one step: positions [start, start + len(ids))."""

    slot: int
    """Window slot."""
    pages: Sequence[int]
    """Pages of the context, enough for every row."""
    start: int
    """Rows fed before."""
    ids: Sequence[int]
    """Tokens fed now, at least one."""


@dataclass(kw_only=True)
class _Entries:
    """Index tensors of one compression ratio."""

    members: torch.Tensor
    """[N, r] place in (rows of the step, saved halves) of each new entry's halves."""
    position: torch.Tensor
    """[N] first token of each new entry."""
    table_row: torch.Tensor
    """[N] where each new entry is stored."""
    saved_rows: torch.Tensor
    """Rows whose halves wait for a later step."""
    saved_places: torch.Tensor
    """Where they are kept."""
    old_places: torch.Tensor
    """[B * (r-1)] places of the contexts' saved halves."""
    length: int
    """Entries of the longest context, rounded up to whole blocks."""
    has_blind: bool
    """Some row sees no entry: what its slots point to may never have been written."""


class PagedStore:
    """Implements KVStore for one step, and owns the step's `rows`.

    Args:
        pages, windows: the pools.
        feeds: contexts of the step, each once.
        pad: fill up to a multiple of 16 rows (deterministic mode).
    """

    def __init__(self, pages: PagePool, windows: WindowPool, feeds: Sequence[Feed], *, pad: bool) -> None:
        self._pages, self._windows = pages, windows
        self.geometry = pages.geometry
        self._plans = self.geometry.config.layers()
        self._device = windows.rings.device
        starts = torch.tensor([feed.start for feed in feeds])
        counts = torch.tensor([len(feed.ids) for feed in feeds])
        ends = starts + counts
        self._slots = torch.tensor([feed.slot for feed in feeds])
        width = max(1, *(len(feed.pages) for feed in feeds))
        table = torch.tensor([[*feed.pages, *([0] * (width - len(feed.pages)))] for feed in feeds])
        self.last_rows = counts.cumsum(0) - 1
        """[B] row of each context's last token."""
        context = torch.repeat_interleave(torch.arange(len(feeds)), counts)
        num_live = context.numel()
        position = (starts - (counts.cumsum(0) - counts))[context] + torch.arange(num_live)
        token_id = torch.tensor([token for feed in feeds for token in feed.ids])
        self._entries = {
            ratio: self._plan_entries(ratio, context, position, starts, ends, table, pad)
            for ratio in self.geometry.ratios
        }
        self._plan_windows(context, position, starts, ends, extra=-num_live % TILE if pad else 0)
        self.rows = self._build_rows(token_id, position, context, extra=-num_live % TILE if pad else 0)
        self._move(table)
        self._selected: torch.Tensor | None = None
        self._gathered: tuple[int, torch.Tensor] | None = None
        self._keys: dict[int, torch.Tensor] = {}

    def _build_rows(self, token_id: torch.Tensor, position: torch.Tensor, context: torch.Tensor, extra: int) -> Rows:
        def padded(values: torch.Tensor, fill: int | bool) -> torch.Tensor:
            values = torch.cat((values, values.new_full((extra,), fill))) if extra else values
            return values.to(self._device)

        live = padded(torch.ones(len(token_id), dtype=torch.bool), False)
        half = HalfRows(
            index=torch.arange(len(live), device=self._device),
            chain=padded(context, -1),
            floor=torch.zeros(len(live), dtype=torch.int64, device=self._device),
        )
        return Rows(
            token_id=padded(token_id, 0),
            position=padded(position, 0),
            context=padded(context, 0),
            live=live,
            writes_global=live,
            encoder=half,
            decoder=half,
        )

    def _plan_windows(
        self, context: torch.Tensor, position: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, extra: int
    ) -> None:
        """Where each row finds its W keys in (rings of the step's contexts, rows of the step), and what is kept."""
        window, num_past = self.geometry.window, len(starts) * self.geometry.window
        row = torch.arange(len(position)).unsqueeze(1)
        offset = torch.arange(1 - window, 1)
        wanted = position.unsqueeze(1) + offset
        in_step = wanted >= starts[context].unsqueeze(1)
        index = torch.where(in_step, num_past + row + offset, context.unsqueeze(1) * window + wanted % window)
        valid = wanted >= 0
        # a slot without a key points to the row's own: older ring places are never read
        index = torch.where(valid, index, num_past + row)
        if extra:
            padding = num_past + len(position) + torch.arange(extra).unsqueeze(1)
            index = torch.cat((index, padding.expand(-1, window)))
            valid = torch.cat((valid, valid.new_zeros(extra, window)))
        kept = torch.nonzero(position >= (ends - window)[context]).squeeze(1)
        places = self._slots[context[kept]] * window + position[kept] % window
        self._window_index, self._window_valid = index, valid
        self._kept_rows, self._kept_places = kept, places

    def _plan_entries(
        self,
        ratio: int,
        context: torch.Tensor,
        position: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        table: torch.Tensor,
        pad: bool,
    ) -> _Entries:
        entries_per_page = PAGE_TOKENS // ratio
        last = torch.nonzero((position + 1) % ratio == 0).squeeze(1)
        entry, owner = position[last] // ratio, context[last]
        page = table[owner, entry // entries_per_page]
        back = torch.arange(1 - ratio, 1)
        in_step = position[last].unsqueeze(1) + back >= starts[owner].unsqueeze(1)
        saved = len(position) + owner.unsqueeze(1) * (ratio - 1) + torch.arange(ratio).clamp_max(max(0, ratio - 2))
        unfinished = position >= (ends - ends % ratio)[context]
        saved_rows = torch.nonzero(unfinished).squeeze(1) if ratio > 1 else last[:0]
        saved_owner = context[saved_rows]
        slot_base = self._slots * (ratio - 1)
        length = int(ends.max()) // ratio
        return _Entries(
            members=torch.where(in_step, last.unsqueeze(1) + back, saved),
            position=entry * ratio,
            table_row=page * entries_per_page + entry % entries_per_page,
            saved_rows=saved_rows,
            saved_places=slot_base[saved_owner] + position[saved_rows] % ratio,
            old_places=(slot_base.unsqueeze(1) + torch.arange(ratio - 1)).flatten(),
            length=length + -length % BLOCK,
            has_blind=pad or int(starts.min()) + 1 < ratio,
        )

    def _move(self, table: torch.Tensor) -> None:
        device = self._device
        self._num_pages = table.shape[1]
        self._table = table.flatten().to(device)
        self._table_base = (self.rows.context * self._num_pages).unsqueeze(1)
        self._slots = self._slots.to(device)
        self._window_index, self._window_valid = self._window_index.to(device), self._window_valid.to(device)
        self._kept_rows, self._kept_places = self._kept_rows.to(device), self._kept_places.to(device)
        for entries in self._entries.values():
            for name in ("members", "position", "table_row", "saved_rows", "saved_places", "old_places"):
                setattr(entries, name, getattr(entries, name).to(device))

    def window(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVStore."""
        past = self._windows.read(layer, self._slots)
        keys = torch.cat((past.to(kv.dtype), kv)).index_select(0, self._window_index.flatten())
        self._windows.write(layer, self._kept_places, kv.index_select(0, self._kept_rows))
        return keys.view(*self._window_index.shape, kv.shape[-1]), self._window_valid

    def complete_groups(
        self, layer: int, value: torch.Tensor, gate: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See KVStore."""
        entries = self._entries[self._plans[layer].ratio]
        if gate is None:
            return value.index_select(0, entries.members.flatten()).unsqueeze(1), None, entries.position
        halves, num_live = self._windows.halves[layer], self._num_live
        stacked = []
        for part, rows in enumerate((value, gate)):
            old = halves[part].index_select(0, entries.old_places)
            both = torch.cat((rows[:num_live], old)).index_select(0, entries.members.flatten())
            stacked.append(both.unflatten(0, entries.members.shape))
            halves[part].index_copy_(0, entries.saved_places, rows.index_select(0, entries.saved_rows))
        return stacked[0], stacked[1], entries.position

    @property
    def _num_live(self) -> int:
        return int(self.last_rows[-1]) + 1

    def write_global(self, layer: int, main: torch.Tensor, index_key: torch.Tensor) -> None:
        """See KVStore."""
        self._pages.write(layer, self._entries[self._plans[layer].ratio].table_row, main, index_key)

    def index_keys(self, layer: int) -> torch.Tensor:
        """See KVStore; entries past a context's end hold any finite or non-finite value, which no row may see."""
        plan = self._plans[layer]
        if plan.kv_source not in self._keys:
            entries_per_page = PAGE_TOKENS // plan.ratio
            num_contexts = self._table.numel() // self._num_pages
            entry = torch.arange(self._entries[plan.ratio].length, device=self._device)
            column = (entry // entries_per_page).clamp_max(self._num_pages - 1)
            page = self._table.view(num_contexts, -1).index_select(1, column)
            keys = self._pages.read_index(
                plan.kv_source, (page * entries_per_page + entry % entries_per_page).flatten()
            )
            self._keys[plan.kv_source] = keys.view(num_contexts, -1, keys.shape[-1])
        return self._keys[plan.kv_source]

    def gather_main(self, layer: int, selected: torch.Tensor) -> torch.Tensor:
        """See KVStore; layers that read one selection of one source share the decoded entries."""
        plan = self._plans[layer]
        if self._gathered is None or self._selected is not selected or self._gathered[0] != plan.kv_source:
            entries_per_page = PAGE_TOKENS // plan.ratio
            entry = selected.clamp_min(0)
            page = self._table[self._table_base + entry // entries_per_page]
            rows = (page * entries_per_page + entry % entries_per_page).flatten()
            keys = self._pages.read_main(plan.kv_source, rows)
            if self._entries[plan.ratio].has_blind:
                keys.masked_fill_((selected < 0).view(-1, 1), 0.0)
            self._selected, self._gathered = selected, (plan.kv_source, keys.view(*selected.shape, -1))
        return self._gathered[1]
