"""Scheduler: which rows run in the next step, and who holds pages and window slots.

Decode rows first, then prefill chunks of the oldest requests under one row budget, then admission in order of arrival.
When pages run short, idle resident contexts go first (least recently used), then the youngest running request is put
back to wait: it keeps its output and is prefilled again. Knows neither the model nor sampling.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from burnish.policy.inference.cache.pages import PagePool
from burnish.policy.inference.cache.windows import WindowPool
from burnish.policy.inference.config import EngineConfig
from burnish.policy.inference.geometry import CacheGeometry
from burnish.policy.inference.prefill import PrefillSource
from burnish.policy.inference.sequence import Context, Sequence


@dataclass(frozen=True, kw_only=True)
class Work:
    """Rows of one request in one step."""

    sequence: Sequence
    count: int
    """Rows [computed, computed + count) are fed."""

    @property
    def samples(self) -> bool:
        """The step ends with every id fed, so the next one is drawn."""
        return self.count == self.sequence.num_left


class Scheduler:
    """Owns the queues, the contexts and the pools' assignments."""

    def __init__(self, config: EngineConfig, geometry: CacheGeometry, pages: PagePool, windows: WindowPool) -> None:
        self.config, self.geometry = config, geometry
        self.pages, self.windows = pages, windows
        self.contexts: dict[str, Context] = {}
        self.waiting: list[Sequence] = []
        """In order of arrival; put-back requests stand where they arrived."""
        self.running: list[Sequence] = []
        """In order of arrival."""
        self.version = 0
        self.clock = 0
        self.num_preemptions = 0
        self.num_evictions = 0

    def submit(self, sequence: Sequence) -> None:
        """Queue a request on its context."""
        sequence.context.request = sequence
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.arrival)

    def plan(self) -> list[Work]:
        """The next step's rows, decode rows first; pages for them are held. Empty when nothing can run."""
        self.clock += 1
        for sequence in list(self.running):
            # an earlier turn of this loop may have put this one back
            if sequence.context.is_running:
                self._grow(sequence)
        budget = self.config.max_step_rows
        work = [Work(sequence=s, count=1) for s in self.running if s.num_left == 1]
        budget -= len(work)
        for sequence in self.running:
            if sequence.num_left > 1 and budget > 0:
                work.append(Work(sequence=sequence, count=min(budget, sequence.num_left)))
                budget -= work[-1].count
        while budget > 0 and self.waiting and len(self.running) < self.config.max_running:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            work.append(Work(sequence=sequence, count=min(budget, sequence.num_left)))
            budget -= work[-1].count
        for item in work:
            item.sequence.context.last_used = self.clock
        return work

    def _grow(self, sequence: Sequence) -> None:
        """Hold pages for every id of a running request, making room where needed."""
        context = sequence.context
        missing = self.geometry.pages(len(sequence.ids)) - len(context.pages)
        while missing > self.pages.num_free and not self._evict_one(keep=context):
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is sequence:
                return
        if missing > 0:
            context.pages += self.pages.take(missing)

    def _admit(self, sequence: Sequence) -> bool:
        """Give the request what it needs to run, or leave everything as it is."""
        context = sequence.context
        hit = self._hit(sequence)
        held = len(context.pages) if hit else 0
        needed = self.geometry.pages(len(sequence.ids)) - held
        # some of the running requests need a page soon: with many of them, an admission without reserve only preempts
        reserve = len(self.running) // 4
        idle = [c for c in self.contexts.values() if c.is_resident and not c.is_running and c is not context]
        own = 0 if hit else len(context.pages)
        if needed + reserve > self.pages.num_free + own + sum(len(c.pages) for c in idle):
            return False
        if not hit and not (context.is_resident or self.windows.num_free or idle):
            return False
        if not hit:
            self.drop(context)
            if not self.windows.num_free:
                self._evict_one(keep=context)
            context.slot = self.windows.take()
            context.epoch += 1
        while needed > self.pages.num_free:
            self._evict_one(keep=context)
        context.pages += self.pages.take(needed)
        sequence.prefill_hit = hit
        sequence.prefill_source = PrefillSource.resident if hit else PrefillSource.cold
        sequence.prefill_end = len(sequence.ids)
        sequence.prefill_version = self.version
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_routed = hit
        context.ids = sequence.ids
        context.is_running = True
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.arrival)
        return True

    def _hit(self, sequence: Sequence) -> int:
        """Rows of the request that its resident context has fed already; at least one is left to feed."""
        context = sequence.context
        if not context.is_resident or context.computed >= len(sequence.ids):
            return 0
        return context.computed if sequence.ids[: context.computed] == context.ids else 0

    def _evict_one(self, keep: Context) -> bool:
        """Drop the least recently used context that does not run; those without a waiting request go first."""
        idle = [c for c in self.contexts.values() if c.is_resident and not c.is_running and c is not keep]
        if not idle:
            return False
        self.drop(min(idle, key=lambda c: (c.request is not None, c.last_used)))
        self.num_evictions += 1
        return True

    def drop(self, context: Context) -> None:
        """Free a context's cache state: its next prefill is cold."""
        if context.is_resident:
            self.windows.release(context.slot)
            self.pages.release(context.pages)
        context.slot, context.pages, context.computed, context.ids = -1, [], 0, []

    def preempt(self, sequence: Sequence) -> None:
        """Put a running request back to wait; its output stays, its ids are prefilled again."""
        sequence.close_prefill()
        self.running.remove(sequence)
        sequence.context.is_running = False
        self.drop(sequence.context)
        self.submit(sequence)
        self.num_preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is; its context stays resident if asked for."""
        context = sequence.context
        sequence.close_prefill()
        if context.is_running:
            self.running.remove(sequence)
            # the last id was not fed: the context stands for its fed rows only
            context.ids = sequence.ids[: context.computed]
        else:
            self.waiting.remove(sequence)
        context.is_running, context.request = False, None
        # a context that never ran has nothing to remember
        if not sequence.keep_resident or context.epoch < 0:
            self.forget(context)

    def forget(self, context: Context) -> None:
        """Drop a context and its name."""
        self.drop(context)
        self.contexts.pop(context.context_id, None)

    def drop_all(self) -> None:
        """After a change of weights: no row fed before may be read again."""
        for sequence in list(self.running):
            self.preempt(sequence)
            self.num_preemptions -= 1
        self.drop_idle(self.contexts.values())

    def drop_idle(self, contexts: Iterable[Context]) -> None:
        """Drop those of `contexts` that do not run."""
        for context in contexts:
            if not context.is_running:
                self.drop(context)
