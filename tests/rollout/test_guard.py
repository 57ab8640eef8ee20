"""Guard rules: what they mean, what they refuse, and when they trip."""

import math

import pytest

from burnish.envs.errors import UserError
from burnish.rollout.guard import Action, Guard, GuardTripped, Rule


def guard(*rules: str) -> Guard:
    return Guard(rules=[Rule.parse(rule) for rule in rules])


def test_a_rule_trips_after_as_many_bad_values_in_a_row_and_says_since_when():
    watched = guard("train/grad_norm > 10 for 3: rollback")
    for version, norm in enumerate([11, 12, 9, 11, 12], start=1):
        watched.check({"train/grad_norm": norm}, version)
    with pytest.raises(GuardTripped, match="since policy version 4") as tripped:
        watched.check({"train/grad_norm": 13.0}, 6)
    assert (tripped.value.action, tripped.value.since, tripped.value.value) == (Action.rollback, 4, 13.0)
    # counted anew afterwards
    watched.check({"train/grad_norm": 13.0}, 7)


def test_values_that_were_not_measured_neither_count_nor_clear():
    watched = guard("train/behaviour_kl >= 0.5 for 2: pause")
    watched.check({"train/behaviour_kl": 0.5}, 1)
    watched.check({"rollout/reward": 1.0}, 1)
    with pytest.raises(GuardTripped):
        watched.check({"train/behaviour_kl": 0.6}, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_matches_what_is_not_finite_and_nothing_else(value):
    watched = guard("train/loss is nan: pause", "train/loss < 5: rollback")
    with pytest.raises(GuardTripped) as tripped:
        watched.check({"train/loss": value}, 3)
    assert tripped.value.action is Action.pause
    guard("train/loss is nan: pause").check({"train/loss": 1e30}, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train/grad_norm > 10", "expected 'METRIC OP NUMBER"),
        ("train/grad_norm > 10: stop", "expected 'METRIC OP NUMBER"),
        ("train/grad_norm == 10: pause", "expected 'METRIC OP NUMBER"),
        ("grad_norm > 10: pause", "expected 'METRIC OP NUMBER"),
        ("trian/grad_norm > 10: pause", "metric 'trian/grad_norm' is none of"),
        ("train/grad_norm > ten: pause", "'ten' in"),
        ("train/grad_norm > nan: pause", "'is' goes with nan"),
        ("train/grad_norm is 3: pause", "'is' goes with nan"),
        ("train/grad_norm > 1 for 0: pause", "at least 1 value"),
    ],
)
def test_what_is_no_rule_is_refused_with_its_part(text, says):
    with pytest.raises(UserError, match="guard:") as refused:
        Rule.parse(text)
    assert says in str(refused.value)
