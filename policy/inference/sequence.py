"""What the engine knows of a request and of its context: sampling parameters, live state, what is handed back.

Only the scheduler and the engine change a Context or a Sequence. Knows neither caches nor the model.
"""

from dataclasses import dataclass, field

import torch

from burnish.policy.inference.prefill import PrefillEntry, PrefillSource

ABSENT_ROUTE = 0xFFFF
"""Expert id of a row that was not run in a layer."""

# one copy in so many rows keeps routes from holding every step they came from
_PARTS_PER_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: float = 1.0
    """Smallest set of most likely tokens that holds this much probability, after top_k; 1 is off."""
    top_k: int = 0
    """Most likely tokens kept; 0 is off."""
    max_tokens: int
    """Sampled tokens at most."""
    stop_ids: tuple[int, ...] = ()
    """Sampling one of them ends the request; it is part of the output."""
    seed: int = 0
    """With the context position, the only source of randomness."""

    def __post_init__(self) -> None:
        checks = [
            (self.temperature >= 0, "temperature", "at least 0", self.temperature),
            (0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p),
            (self.top_k >= 0, "top_k", "at least 0 (0 is off)", self.top_k),
            (self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens),
        ]
        for ok, name, expected, got in checks:
            if not ok:
                raise ValueError(f"sampling: {name} must be {expected}, got {got}")


@dataclass(kw_only=True)
class Generation:
    """Everything one request produced; whole for an aborted one too."""

    request_id: str
    context_id: str
    prompt_len: int
    """Ids given."""
    ids: list[int]
    """Ids sampled, a stop id included."""
    lp_raw: list[float]
    """Log-probability under the full softmax at temperature 1."""
    lp_behaviour: list[float]
    """Log-probability under the distribution that was sampled: temperature, top-k, top-p, reserved ids removed."""
    versions: list[int]
    """Policy version that sampled each token."""
    routes: torch.Tensor | None
    """uint16 [rows, layers, k]: experts of context position `cached_tokens + i` when its row was first run for this
    request; 0xFFFF where absent. One row less than tokens: the last sampled one was not fed."""
    kept: list[list[int]] | None
    """Ids left by truncation, per token (empty: nothing cut); None when no token's distribution was truncated."""
    finish_reason: str
    """stop, length or abort."""
    prefill_entries: list[PrefillEntry]
    """What each prefill of this request did, in order."""
    cached_tokens: int
    """Rows that the first prefill found already fed."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What a request sampled since the last report."""

    request_id: str
    ids: list[int]
    lp_raw: list[float]
    lp_behaviour: list[float]
    versions: list[int]
    finish_reason: str | None
    """None while the request goes on."""


@dataclass(kw_only=True)
class Context:
    """Append-only ids and the cache state that stands for their first `computed` ones."""

    context_id: str
    ids: list[int] = field(default_factory=list)
    """While idle: the ids whose rows were fed. While a request runs: all its ids, sampled ones included."""
    computed: int = 0
    """Rows fed; 0 when the state was dropped."""
    slot: int = -1
    """Window slot, -1: none."""
    pages: list[int] = field(default_factory=list)
    """Pages of the global cache, in order."""
    epoch: int = -1
    """Full prefills so far, less one."""
    last_used: int = 0
    """Step of the last use, for eviction."""
    request: "Sequence | None" = None
    """The request that waits or runs on it."""
    is_running: bool = False

    @property
    def is_resident(self) -> bool:
        return self.slot >= 0


@dataclass(kw_only=True)
class Sequence:
    """One request."""

    request_id: str
    context: Context
    ids: list[int]
    """Prompt and sampled ids."""
    prompt_len: int
    sampling: SamplingParams
    keep_resident: bool
    arrival: int
    """Order of service."""
    limit: int
    """Length at which the request ends: max_tokens or the context's limit."""
    lp_raw: list[float] = field(default_factory=list)
    lp_behaviour: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    is_truncated: bool = False
    routes: list[torch.Tensor] = field(default_factory=list)
    """Parts [n, layers, k] of consecutive positions from `cached_tokens` on; see `add_routes`."""
    num_route_chunks: int = 0
    """Parts at the start that are copies of their own."""
    num_routed: int = 0
    """One past the last position whose routes are kept."""
    cached_tokens: int | None = None
    prefill_entries: list[PrefillEntry] = field(default_factory=list)
    prefill_hit: int = 0
    prefill_source: PrefillSource = PrefillSource.cold
    prefill_end: int | None = None
    """End of the prefill that is under way; None between prefills."""
    prefill_version: int = 0
    num_reported: int = 0
    """Sampled ids that events() has handed out."""
    finish_reason: str | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def num_left(self) -> int:
        """Rows to feed before the next token can be sampled."""
        return len(self.ids) - self.context.computed

    def add_routes(self, part: torch.Tensor) -> None:
        """Append a part; it may be a view of a whole step's routes, which is let go of after some parts."""
        self.routes.append(part)
        if len(self.routes) - self.num_route_chunks >= _PARTS_PER_CHUNK:
            self.routes[self.num_route_chunks :] = [torch.cat(self.routes[self.num_route_chunks :])]
            self.num_route_chunks += 1

    def forget_routes(self) -> None:
        """After a change of weights before the first token was sampled: the prompt's rows are run and recorded again."""
        self.routes, self.num_route_chunks, self.num_routed = [], 0, self.cached_tokens or 0

    def close_prefill(self) -> None:
        """Log the prefill under way as far as it came: finished, or cut short by an abort, a preemption or a swap."""
        if self.prefill_end is None:
            return
        end = min(self.prefill_end, self.context.computed)
        if end > self.prefill_hit:
            entry = PrefillEntry(
                hit=self.prefill_hit,
                source=self.prefill_source,
                end=end,
                decoder_start=self.prefill_hit,
                # narrowing is off and chains start at 0: the decoder's windows reach as far as the encoder's
                decoder_floor=0,
                version=self.prefill_version,
                epoch=self.context.epoch,
            )
            self.prefill_entries.append(entry)
        self.prefill_end = None

    def to_event(self) -> Event:
        """What was sampled since the last call."""
        new, first = slice(self.num_reported, None), self.prompt_len + self.num_reported
        event = Event(
            request_id=self.request_id,
            ids=self.ids[first:],
            lp_raw=self.lp_raw[new],
            lp_behaviour=self.lp_behaviour[new],
            versions=self.versions[new],
            finish_reason=self.finish_reason,
        )
        self.num_reported = self.num_sampled
        return event

    def to_generation(self) -> Generation:
        """The answer, once `finish_reason` is set."""
        assert self.finish_reason is not None, f"request {self.request_id} has not ended"
        return Generation(
            request_id=self.request_id,
            context_id=self.context.context_id,
            prompt_len=self.prompt_len,
            ids=self.ids[self.prompt_len :],
            lp_raw=self.lp_raw,
            lp_behaviour=self.lp_behaviour,
            versions=self.versions,
            routes=torch.cat(self.routes) if self.routes else None,
            kept=self.kept if self.is_truncated else None,
            finish_reason=self.finish_reason,
            prefill_entries=self.prefill_entries,
            cached_tokens=self.cached_tokens or 0,
        )
