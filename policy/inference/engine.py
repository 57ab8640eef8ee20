"""Engine: continuous batching over one model. Requests in, tokens with their full record out, one step at a time.

Life cycle: construct, `add_request` and `step` in a loop, `abort`, `release` and `update_weights` between steps; not
thread-safe: one thread calls it. The forward is the trainer's, with the paged store behind it.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids

import torch
from torch import nn

from burnish.kernels.tile.reference import one_thread
from burnish.policy.inference.cache.pages import PagePool
from burnish.policy.inference.cache.store import Feed, PagedStore
from burnish.policy.inference.cache.windows import WindowPool
from burnish.policy.inference.config import PAGE_TOKENS, EngineConfig
from burnish.policy.inference.geometry import CacheGeometry
from burnish.policy.inference.sampler import Sampled, reserved_mask, sample
from burnish.policy.inference.scheduler import Scheduler, Work
from burnish.policy.inference.sequence import Context, Event, Generation, SamplingParams, Sequence
from burnish.policy.inference.weights import load_in_place
from burnish.policy.model.transformer import Transformer

logger = logging.getLogger(__name__)

# ended requests whose last event nobody has fetched yet; older ones are forgotten where events() is never called
_MAX_UNREPORTED = 4096


class Engine:
    """Owns the model's weights while it lives: `update_weights` is the only way to change them.

    Args:
        model: put on its device by the caller.
        config: sizes and modes.
        policy_version: of the weights that `model` holds now.

    Raises:
        ValueError: a geometry that the caches cannot hold.
    """

    def __init__(self, model: Transformer, config: EngineConfig, *, policy_version: int = 0) -> None:
        self.model, self.config = model, config
        self.geometry = CacheGeometry(model.config)
        device = model.embed.weight.device
        self.pages = PagePool(self.geometry, config.num_pages, device)
        self.windows = WindowPool(self.geometry, config.max_contexts, device)
        self.scheduler = Scheduler(config, self.geometry, self.pages, self.windows)
        self.scheduler.version = policy_version
        limit = min(config.max_context_tokens or model.config.max_position_embeddings, config.num_pages * PAGE_TOKENS)
        self.max_context_tokens = min(limit, model.config.max_position_embeddings)
        """Tokens one context may have, prompt and output."""
        self.on_rows: Callable[[list[Work], torch.Tensor], None] | None = None
        """Called after each forward with the step's work and its final hidden rows [R, D], in that order, padding last."""
        self._sequences: dict[str, Sequence] = {}
        self._unreported: deque[Sequence] = deque(maxlen=_MAX_UNREPORTED)
        self._arrivals = itertools.count()
        reserved = [*model.config.placeholder_ids, *config.reserved_ids]
        self._reserved = reserved_mask(model.config.vocab_size, reserved, device)
        self._counts = dict.fromkeys(
            ("steps", "rows", "decode_rows", "prefill_rows", "sampled", "cached_tokens", "prompt_tokens", "finished",
             "aborted", "reserved_draws", "weight_updates", "rejected_updates"), 0,
        )  # fmt: skip
        self._busy_s = 0.0
        logger.info(
            "Initializing engine (%d pages of %d bytes, %d window slots of %d bytes, %d running, %s)",
            config.num_pages, self.geometry.page_bytes, config.max_contexts, self.geometry.window_state_bytes,
            config.max_running, "deterministic" if config.deterministic else "fast",
        )  # fmt: skip

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample now."""
        return self.scheduler.version

    @property
    def has_work(self) -> bool:
        """A request waits or runs."""
        return bool(self._sequences)

    def add_request(
        self, request_id: str, context_id: str, ids: Ids[int], sampling: SamplingParams, keep_resident: bool = False
    ) -> None:
        """Queue one turn.

        Args:
            request_id: unique among requests that have not ended.
            context_id: if a resident context of this name is a prefix of `ids`, only the new rows are fed.
            ids: the whole context so far.
            sampling: how to draw.
            keep_resident: keep the context's state after the turn, until `release`, eviction or a weight update.

        Raises:
            ValueError: an id in use, a busy context, ids outside the vocabulary, no room for one more token.
        """
        if request_id in self._sequences:
            raise ValueError(f"engine: request {request_id} is waiting or running already")
        context = self.scheduler.contexts.get(context_id)
        if context is not None and context.request is not None:
            raise ValueError(
                f"engine: context {context_id} is busy with request {context.request.request_id}; "
                f"abort it or wait before adding {request_id}"
            )
        vocab_size = self.model.config.vocab_size
        if not ids:
            raise ValueError(f"engine: request {request_id} has no ids; a context starts with at least one token")
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise ValueError(
                f"engine: request {request_id} has token id {wrong}, the vocabulary ends at {vocab_size - 1}"
            )
        if len(ids) >= self.max_context_tokens:
            raise ValueError(
                f"engine: request {request_id} has {len(ids)} ids, but a context holds {self.max_context_tokens} "
                f"(prompt and at least one sampled token)"
            )
        if context is None:
            context = self.scheduler.contexts[context_id] = Context(context_id=context_id)
        sequence = Sequence(
            request_id=request_id,
            context=context,
            ids=list(ids),
            prompt_len=len(ids),
            sampling=sampling,
            keep_resident=keep_resident,
            arrival=next(self._arrivals),
            limit=min(len(ids) + sampling.max_tokens, self.max_context_tokens),
        )
        self._sequences[request_id] = sequence
        self.scheduler.submit(sequence)

    def step(self) -> list[Generation]:
        """Run one forward over the next rows and draw where a request is ready.

        Returns:
            The requests that ended in this step.
        """
        started = time.perf_counter()
        work = self.scheduler.plan()
        if not work:
            assert not self.has_work, "requests wait, but none can be admitted into an idle engine"
            return []
        feeds = [
            Feed(
                slot=item.sequence.context.slot,
                pages=item.sequence.context.pages,
                start=(start := item.sequence.context.computed),
                ids=item.sequence.ids[start : start + item.count],
            )
            for item in work
        ]
        try:
            ended = self._forward(work, feeds)
        except BaseException:
            # rings may hold half a step: every context of it is prefilled again
            for item in work:
                if item.sequence.context.is_running:
                    self.scheduler.preempt(item.sequence)
            raise
        self._counts["steps"] += 1
        self._busy_s += time.perf_counter() - started
        return ended

    @torch.inference_mode()
    def _forward(self, work: list[Work], feeds: list[Feed]) -> list[Generation]:
        deterministic = self.config.deterministic
        store = PagedStore(self.pages, self.windows, feeds, pad=deterministic)
        output = self.model(store.rows, store, deterministic=deterministic)
        if self.on_rows is not None:
            self.on_rows(work, output.hidden)
        sampling = [i for i, item in enumerate(work) if item.samples]
        drawn = None
        if sampling:
            hidden = output.hidden.index_select(0, store.last_rows[sampling].to(output.hidden.device))
            logits = self.model.logits(hidden, deterministic=deterministic)
            sequences = [work[i].sequence for i in sampling]
            with one_thread(deterministic):
                drawn = sample(logits, [s.sampling for s in sequences], [len(s.ids) for s in sequences], self._reserved)
        if self.config.record_routes:
            self._record_routes(work, output.experts)
        self._advance(work)
        return self._append([work[i].sequence for i in sampling], drawn) if drawn is not None else []

    def _record_routes(self, work: list[Work], experts: list[torch.Tensor]) -> None:
        """Frozen when a row is first run by the weights that sample after it: a later prefill does not replace them."""
        routes = torch.stack(experts, 1).to(torch.int16).cpu().view(torch.uint16)  # -1 becomes 0xFFFF
        first = 0
        for item in work:
            sequence, start = item.sequence, item.sequence.context.computed
            skip = max(0, sequence.num_routed - start)
            if skip < item.count:
                sequence.add_routes(routes[first + skip : first + item.count])
                sequence.num_routed = start + item.count
            first += item.count

    def _advance(self, work: list[Work]) -> None:
        for item in work:
            sequence = item.sequence
            context = sequence.context
            is_prefill = sequence.prefill_end is not None
            context.computed += item.count
            self._counts["prefill_rows" if is_prefill else "decode_rows"] += item.count
            self._counts["rows"] += item.count
            if is_prefill and context.computed == sequence.prefill_end:
                sequence.close_prefill()

    def _append(self, sequences: list[Sequence], drawn: Sampled) -> list[Generation]:
        """Commit the drawn tokens; the version is read here, in the step that drew them."""
        ids, lp_raw, lp_behaviour = drawn.ids.tolist(), drawn.lp_raw.tolist(), drawn.lp_behaviour.tolist()
        kept: list[list[int]] = [[]] * len(ids)
        if drawn.kept_ids is not None and drawn.kept_offsets is not None:
            kept_ids, offsets = drawn.kept_ids.tolist(), drawn.kept_offsets.tolist()
            kept = [kept_ids[a:b] for a, b in itertools.pairwise(offsets)]
        self._counts["sampled"] += len(ids)
        self._counts["reserved_draws"] += drawn.num_reserved
        ended = []
        for i, sequence in enumerate(sequences):
            sequence.ids.append(ids[i])
            sequence.lp_raw.append(lp_raw[i])
            sequence.lp_behaviour.append(lp_behaviour[i])
            sequence.versions.append(self.policy_version)
            sequence.kept.append(kept[i])
            sequence.is_truncated |= bool(kept[i])
            if ids[i] in sequence.sampling.stop_ids:
                ended.append(self._end(sequence, "stop"))
            elif len(sequence.ids) >= sequence.limit:
                ended.append(self._end(sequence, "length"))
        return ended

    def _end(self, sequence: Sequence, reason: str) -> Generation:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)
        del self._sequences[sequence.request_id]
        self._unreported.append(sequence)
        self._counts["aborted" if reason == "abort" else "finished"] += 1
        self._counts["cached_tokens"] += sequence.cached_tokens or 0
        self._counts["prompt_tokens"] += sequence.prompt_len
        generation = sequence.to_generation()
        sequence.routes = []
        return generation

    def events(self) -> list[Event]:
        """What each request sampled since the last call, ended ones first; an ended request's last event says why."""
        done = [sequence.to_event() for sequence in self._unreported]
        self._unreported.clear()
        live = [s.to_event() for s in self._sequences.values() if s.num_sampled > s.num_reported]
        return done + live

    def abort(self, request_id: str) -> Generation | None:
        """End a request now, waiting or running.

        Returns:
            Everything it has (also reported by `events`, not by `step`); None for an unknown or ended request.
        """
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, "abort")

    def release(self, context_id: str) -> None:
        """Give up a context's state; unknown names are ignored.

        Raises:
            ValueError: a request waits or runs on it.
        """
        context = self.scheduler.contexts.get(context_id)
        if context is None:
            return
        if context.request is not None:
            raise ValueError(f"engine: context {context_id} is busy with request {context.request.request_id}")
        self.scheduler.forget(context)

    def update_weights(
        self, weights: Mapping[str, torch.Tensor] | nn.Module, version: int, mode: str = "recompute",
        digest: str | None = None,
    ) -> None:  # fmt: skip
        """Swap the weights between two steps; running requests go on under the new ones.

        `recompute`: every context is prefilled again before it goes on (a new epoch); sampled tokens keep their
        log-probabilities, versions and routes; idle residents are dropped. A failing update leaves the old weights,
        version and caches.

        Args:
            weights: every tensor of the model, or a model that holds them.
            version: of the new weights.
            mode: only `recompute`.
            digest: expected `weights_digest`; None skips the check.

        Raises:
            WeightUpdateError: the tensors do not fit.
            ValueError: an unknown mode.
        """
        if mode != "recompute":
            raise ValueError(f"engine: weight update mode must be 'recompute', got {mode!r}")
        state = weights.state_dict() if isinstance(weights, nn.Module) else weights
        try:
            load_in_place(self.model, state, digest=digest)
        except ValueError:
            self._counts["rejected_updates"] += 1
            raise
        self.scheduler.drop_all()
        for sequence in self._sequences.values():
            if not sequence.num_sampled:
                sequence.forget_routes()
        self.scheduler.version = version
        self._counts["weight_updates"] += 1

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, and what is held now."""
        scheduler = self.scheduler
        return {
            **self._counts,
            "busy_s": self._busy_s,
            "preemptions": scheduler.num_preemptions,
            "evictions": scheduler.num_evictions,
            "policy_version": self.policy_version,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "resident": sum(c.is_resident and not c.is_running for c in scheduler.contexts.values()),
            "pages": self.pages.num_pages,
            "pages_free": self.pages.num_free,
            "window_slots_free": self.windows.num_free,
            "global_bytes": self.pages.size_bytes,
        }
