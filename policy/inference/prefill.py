"""The prefill entry: what the engine really did for one prefill, so that the trainer can compute the same function.

One entry per prefill, not per turn: a turn start, a preemption, an abort and resubmit, a recompute and a crash each
make one. Knows no torch: the rollout side stores entries in blocks and the trainer lays rows out from them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class PrefillSource(StrEnum):
    """Where the window state below the hit came from."""

    cold = "cold"
    resident = "resident"
    snapshot = "snapshot"
    bounded = "bounded"


@dataclass(frozen=True, kw_only=True)
class PrefillEntry:
    """One prefill of one context: rows `[hit or replay start, end)` were run with the weights of `version`."""

    hit: int
    """Tokens at the start of the context whose global KV was reused."""
    source: PrefillSource
    """Window state below the hit: still live, restored, rebuilt from the last W rows, or none (cold)."""
    end: int
    """One past the last position this prefill fed."""
    decoder_start: int
    """First position that ran the decoder half."""
    decoder_floor: int
    """First position the decoder chain's windows may read."""
    version: int
    """Policy version of the weights."""
    epoch: int
    """Counts the full re-prefills of this context; a version change between turns opens a new one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", PrefillSource(self.source))
        if not 0 <= self.hit <= self.end:
            raise ValueError(f"prefill entry: hit {self.hit} must lie in [0, end={self.end}]")
        if self.source is PrefillSource.cold and self.hit:
            raise ValueError(f"prefill entry: a cold prefill reuses nothing, got hit={self.hit}")
        if not 0 <= self.decoder_floor <= self.decoder_start <= self.end:
            raise ValueError(
                "prefill entry: expected 0 <= decoder_floor <= decoder_start <= end, got "
                f"{self.decoder_floor}, {self.decoder_start}, {self.end}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` gives the same entry back."""
        return {**asdict(self), "source": self.source.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PrefillEntry":
        """Raises:
        ValueError: a field is missing, unknown or out of range.
        """
        known = set(cls.__dataclass_fields__)
        if set(values) != known:
            raise ValueError(f"prefill entry: expected the fields {sorted(known)}, got {sorted(values)}")
        return cls(**values)
