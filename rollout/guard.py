"""Guardrails: rules on a run's metrics that stop it before it ruins the policy, or take it back to before it began to.

A rule reads `METRIC OP NUMBER [for N]: pause|rollback`, for example `train/grad_norm > 100 for 2: rollback`. `nan` as the
number matches what is not finite. N counts values in a row (1 without it); values that a resume superseded do not count.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from burnish.envs.errors import UserError
from burnish.rollout.types import RolloutError

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
FORM = re.compile(r"(\S+/\S+) (>=|<=|>|<|is) (\S+)(?: for (\d+))?: (pause|rollback)")
KNOWN_AREAS = ("rollout", "train", "weights", "distill")


class Action(StrEnum):
    """What a rule does when it holds."""

    pause = "pause"
    """The run is saved and ends; `burnish rl resume=RUN` goes on with it once somebody has looked."""
    rollback = "rollback"
    """The run goes on from the newest checkpoint before the first bad value, without the slots that led there."""


class GuardTripped(RolloutError):
    """A rule holds."""

    def __init__(self, rule: str, action: Action, since: int, value: float) -> None:
        super().__init__(rule, action, since, value)
        self.rule, self.action, self.since, self.value = rule, action, since, value

    def __str__(self) -> str:
        return f"guard '{self.rule}' holds since policy version {self.since} (last value {self.value:.4g})"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One parsed rule."""

    text: str
    metric: str
    op: str
    threshold: float
    in_a_row: int
    action: Action

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Raises:
        UserError: not a rule; says which part.
        """
        found = FORM.fullmatch(" ".join(text.split()))
        if found is None:
            raise UserError(
                f"guard: expected 'METRIC OP NUMBER [for N]: pause|rollback' such as 'train/grad_norm > 100 for 2: "
                f"rollback', got {text!r}"
            )
        metric, op, number, count, action = found.groups()
        if metric.split("/")[0] not in KNOWN_AREAS:
            raise UserError(f"guard: metric {metric!r} is none of {', '.join(a + '/...' for a in KNOWN_AREAS)}")
        try:
            threshold = float(number)
        except ValueError:
            raise UserError(f"guard: {number!r} in {text!r} is not a number") from None
        if math.isnan(threshold) != (op == "is"):
            raise UserError(f"guard: 'is' goes with nan and nan with 'is', got {text!r}")
        if count is not None and int(count) < 1:
            raise UserError(f"guard: 'for' needs at least 1 value, got {text!r}")
        return cls(
            text=text, metric=metric, op=op, threshold=threshold, in_a_row=int(count or 1), action=Action(action)
        )

    def holds(self, value: float) -> bool:
        if self.op == "is":
            return not math.isfinite(value)
        return math.isfinite(value) and OPERATORS[self.op](value, self.threshold)


@dataclass(kw_only=True)
class Guard:
    """The rules of a run and what they have seen."""

    rules: Sequence[Rule]
    _since: dict[str, list[int]] = field(default_factory=dict)
    """Policy versions of the bad values in a row, by rule."""

    def check(self, metrics: Mapping[str, float], policy_version: int) -> None:
        """Looks at values that were just measured; those of one policy version may come in several calls.

        Raises:
            GuardTripped: a rule holds.
        """
        for rule in self.rules:
            if rule.metric not in metrics:
                continue
            bad = self._since.setdefault(rule.text, [])
            value = metrics[rule.metric]
            if not rule.holds(value):
                bad.clear()
                continue
            bad.append(policy_version)
            if len(bad) >= rule.in_a_row:
                since = bad[0]
                bad.clear()
                raise GuardTripped(rule.text, rule.action, since, value)
