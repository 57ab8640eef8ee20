"""What flows through the RL stage: Slot -> attempts -> Trajectory -> Group -> batch.

A slot is one prompt position of the run: it is trained exactly once, masked, dropped with a reason, or still to come.
An attempt is one try at a slot, with exactly one outcome. A trajectory is what an attempt produced: contexts (append-only
token ids), turns, and the sealed blocks that hold the tokens. Knows no torch and no file: arrays live in blocks.py,
transitions in ledger.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from burnish.policy.inference.prefill import PrefillEntry
from burnish.verifiers.types import Outcome, Verdict

REWARDED = frozenset(outcome for outcome in Outcome if outcome.has_reward)
"""Outcomes that carry a reward. The others say nothing about the policy: their slot is tried again, never scored 0."""

ABSENT_ROUTE = 0xFFFF
"""Expert index of a row whose route was not recorded: the trainer routes it."""


class RolloutError(RuntimeError):
    """Anything a rollout can suffer that is not the policy's doing; one subclass per boundary."""


class HarnessError(RolloutError):
    """The harness could not turn the model's words into an action or an action into a message."""


class ActorLost(RolloutError):
    """An actor died, did not answer in time, or failed in a way of its own; it is named."""


class ActorGone(ActorLost):
    """The actor's process is gone: another one can take its place."""

    def __init__(self, actor: str, reason: str) -> None:
        super().__init__(actor, reason)
        self.actor, self.reason = actor, reason

    def __str__(self) -> str:
        return f"{self.actor} is gone: {self.reason}"


class GenerationError(RolloutError):
    """The engine did not answer, or answered with something that breaks the token contract."""


class Disposition(StrEnum):
    """What became of a slot. Exactly one at any time."""

    pending = "pending"
    """No usable attempt yet; one may be in flight."""
    ready = "ready"
    """An attempt with a reward and its blocks wait for a batch."""
    trained = "trained"
    """In an optimizer step of this lineage, with at least one trained token."""
    masked = "masked"
    """In an optimizer step of this lineage, with every token masked."""
    dropped = "dropped"
    """Will not be trained; the reason says why."""


class DropReason(StrEnum):
    """Why a slot was dropped."""

    stale = "stale"
    early_short = "early_short"
    quarantined = "quarantined"
    zero_variance = "zero_variance"
    too_few_members = "too_few_members"
    too_many_attempts = "too_many_attempts"
    user_stop = "user_stop"
    step_not_finite = "step_not_finite"
    rolled_back = "rolled_back"


class StopReason(StrEnum):
    """Why an episode ended; finer than the outcome."""

    exit = "exit"
    max_turns = "max_turns"
    max_tokens = "max_tokens"
    context_limit = "context_limit"
    wall_clock = "wall_clock"
    env_crash = "env_crash"
    sandbox_error = "sandbox_error"
    harness_error = "harness_error"
    generation_error = "generation_error"
    verifier_error = "verifier_error"
    cancelled = "cancelled"
    abandoned = "abandoned"
    """In flight when its process died; recorded at the next start."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """(task, effort, group, member, pass). The identity is the position in the run's order, never the content: two
    tasks with the same prompt text stay two groups."""

    task_id: str
    effort: str = "none"
    """Effort as it stands in the prompt; `none` where the chat mode has no effort."""
    group_index: int
    """Ordinal of the group within its pass."""
    member: int
    """0 .. group size - 1."""
    pass_index: int = 0
    """How many times the task set was gone through before."""

    def __post_init__(self) -> None:
        if min(self.group_index, self.member, self.pass_index) < 0:
            raise ValueError(f"slot indices must be >= 0, got {self}")

    @property
    def group_id(self) -> str:
        """Safe as a file and container name; sorts in the run's order."""
        return f"{self.pass_index:03d}-{self.group_index:06d}"

    @property
    def slot_id(self) -> str:
        return f"{self.group_id}-{self.member:03d}"

    def attempt_id(self, number: int) -> str:
        """Id of the number-th try (0 based). Never reused: a retry after a crash is a new number."""
        return f"{self.slot_id}-{number:02d}"


@dataclass(frozen=True, kw_only=True)
class BlockRef:
    """Where a sealed block lies and what it must hash to. `offset` and `size` are bytes in the attempt's token log."""

    attempt_id: str
    index: int
    """0, 1, ... in the order of sealing within the attempt."""
    context_id: str
    turn: int
    start: int
    """Position in the context of the block's first token."""
    num_tokens: int
    num_sampled: int
    offset: int
    size: int
    digest: str
    """sha256 (hex) of those bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The tokens one turn added to one context. All per-token arrays have one length by construction (T); L layers
    with experts, K experts a token, M entries of all kept sets.

    Read-only arrays: a block is immutable once sealed.
    """

    attempt_id: str
    index: int
    context_id: str
    turn: int
    start: int
    ids_T: np.ndarray
    """int32."""
    sampled_T: np.ndarray
    """bool; True where the policy drew the token. Only these may be trained."""
    lp_raw_T: np.ndarray
    """float32 log-probability under the full vocabulary at temperature 1; NaN where not sampled (0.0 is a value)."""
    lp_behaviour_T: np.ndarray
    """float32 log-probability under what was really sampled from (temperature, kept set); NaN where not sampled."""
    version_T: np.ndarray
    """int32 policy version that sampled the token; -1 where not sampled."""
    kept_ids_M: np.ndarray
    """int32; kept set of token t is kept_ids_M[kept_offsets[t]:kept_offsets[t + 1]]; empty = full vocabulary."""
    kept_offsets: np.ndarray
    """int64, T + 1 entries."""
    routes_TLK: np.ndarray | None
    """uint16 routed experts of the row that fed the token; 0xFFFF where absent; None when nothing was recorded."""
    prefills: tuple[PrefillEntry, ...]
    """The prefills of this turn, in order."""
    digest: str

    def __len__(self) -> int:
        return len(self.ids_T)

    @property
    def end(self) -> int:
        return self.start + len(self)

    def kept(self, token: int) -> np.ndarray:
        """Kept set of the token at this index; empty = full vocabulary."""
        return self.kept_ids_M[self.kept_offsets[token] : self.kept_offsets[token + 1]]


@dataclass(frozen=True, kw_only=True)
class Context:
    """One append-only list of token ids; a trajectory is a tree of them."""

    context_id: str
    parent: str | None = None
    parent_len: int = 0
    """Tokens taken over from the parent: this context's blocks start at this position."""
    reason: str = "root"
    """root | compaction | sub_agent | rewrite."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One generation and what came of it. The tokens are in the block; this is for people and metrics."""

    index: int
    context_id: str
    action: str
    """What the policy said, decoded."""
    observation: str = ""
    """What came back, as it stood in the next message; empty for the last turn."""
    finish_reason: str = "stop"
    exit_code: int | None = None
    timed_out: bool = False
    num_input_tokens: int = 0
    num_sampled_tokens: int = 0
    generate_s: float = 0.0
    execute_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What one attempt produced. Complete even when it failed: the outcome says how."""

    slot: Slot
    attempt_id: str
    outcome: Outcome
    stop_reason: StopReason
    contexts: tuple[Context, ...] = ()
    turns: tuple[Turn, ...] = ()
    blocks: tuple[BlockRef, ...] = ()
    verdict: Verdict | None = None
    is_graded: bool = True
    """False where the run grades nothing (distillation): then no outcome has a verdict."""
    error: str = ""
    """Class and message of what broke, for outcomes without reward."""
    version_start: int = -1
    """Policy version when the attempt was dispatched."""
    version_end: int = -1
    """Policy version when it ended."""
    wall_s: float = 0.0
    extras: dict[str, float] = field(default_factory=dict)
    """Further numbers of the episode, for metrics only."""

    def __post_init__(self) -> None:
        is_due = self.outcome in REWARDED and self.is_graded
        if is_due and self.verdict is None:
            raise ValueError(f"attempt {self.attempt_id}: outcome {self.outcome} carries a reward, got no verdict")
        if not is_due and self.verdict is not None:
            what = f"outcome {self.outcome}" if self.is_graded else "an ungraded attempt"
            raise ValueError(f"attempt {self.attempt_id}: {what} may not carry a verdict")
        strangers = [ref.index for ref in self.blocks if ref.attempt_id != self.attempt_id]
        if strangers:
            raise ValueError(f"attempt {self.attempt_id}: blocks {strangers} belong to another attempt")

    @property
    def is_usable(self) -> bool:
        """It ended by the policy's own doing: its tokens may be trained on."""
        return self.outcome in REWARDED

    @property
    def has_reward(self) -> bool:
        return self.verdict is not None

    @property
    def reward(self) -> float:
        """Raises:
        ValueError: the outcome carries no reward; it must not be read as 0.
        """
        if self.verdict is None:
            raise ValueError(f"attempt {self.attempt_id}: outcome {self.outcome} carries no reward")
        return self.verdict.reward

    @property
    def num_sampled(self) -> int:
        """Distinct sampled tokens over all contexts: each sits in exactly one block."""
        return sum(ref.num_sampled for ref in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON (token arrays stay in the blocks)."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Trajectory":
        verdict = values["verdict"]
        return cls(
            **{
                **values,
                "slot": Slot(**values["slot"]),
                "outcome": Outcome(values["outcome"]),
                "stop_reason": StopReason(values["stop_reason"]),
                "contexts": tuple(Context(**c) for c in values["contexts"]),
                "turns": tuple(Turn(**t) for t in values["turns"]),
                "blocks": tuple(BlockRef(**b) for b in values["blocks"]),
                "verdict": None if verdict is None else Verdict(**verdict),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """The trajectories of one (task, effort, pass): what an advantage is relative to."""

    group_id: str
    members: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        wrong = [t.attempt_id for t in self.members if t.slot.group_id != self.group_id]
        if wrong:
            raise ValueError(f"group {self.group_id}: attempts {wrong} belong to another group")
        kinds = {(t.slot.task_id, t.slot.effort) for t in self.members}
        if len(kinds) > 1:
            raise ValueError(f"group {self.group_id}: one group has one task and one effort, got {sorted(kinds)}")
        slots = [t.slot.slot_id for t in self.members]
        if len(set(slots)) != len(slots):
            raise ValueError(f"group {self.group_id}: two trajectories of one slot in {slots}")

    @classmethod
    def of(cls, members: Sequence[Trajectory]) -> "Group":
        return cls(group_id=members[0].slot.group_id, members=tuple(members))

    @property
    def rewards(self) -> list[float]:
        """Rewards of the members that carry one, in member order."""
        return [t.reward for t in self.members if t.has_reward]
