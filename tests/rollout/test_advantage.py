"""Advantages: the golden numbers, and what must not move a baseline."""

import math

import numpy as np
import pytest

from burnish.envs.errors import UserError
from burnish.rollout.advantage import (
    ADVANTAGES,
    RolloutScores,
    discounted_returns,
    grpo,
    is_constant,
    load_advantage,
    whiten,
)


def scores(rewards, groups=None, valid=None, tokens=None) -> RolloutScores:
    n = len(rewards)
    return RolloutScores(
        rewards=rewards,
        group_ids=groups or ["g"] * n,
        valid=valid or [True] * n,
        num_tokens=tokens or [1] * n,
    )


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {"is_sample_std": False}, [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3),
        ("centred", {}, [0.75, -0.25, -0.25, -0.25]),
        ("dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
        ("maxrl", {}, [3, -1, -1, -1]),
        ("rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce_pp", {}, [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3),
    ],
)
def test_one_success_in_four(name, options, expected):
    np.testing.assert_allclose(load_advantage(name, options)(scores([1, 0, 0, 0])), expected, rtol=3e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("centred", [0.583333, 0, -0.416667, -0.166667]),
        ("grpo", [1.120895, 0, -0.800639, -0.320256]),
        ("rloo", [0.875, 0, -0.625, -0.25]),
    ],
)
def test_a_fully_masked_rollout_does_not_move_its_siblings(name, expected):
    valid = [True, False, True, True]
    np.testing.assert_allclose(load_advantage(name)(scores([1, 0.5, 0, 0.25], valid=valid)), expected, atol=5e-7)
    same = load_advantage(name)(scores([1, math.nan, 0, 0.25], valid=valid))  # whatever stands there
    np.testing.assert_allclose(same, expected, atol=5e-7)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_properties_of_every_estimator(name):
    compute = load_advantage(name)
    # one valid member: nothing to compare with
    assert compute(scores([3.0, 1.0], valid=[True, False])) == [0, 0]
    # nobody valid
    assert compute(scores([1.0, 0.0], valid=[False, False])) == [0, 0]
    # all equal: exactly 0, also where float32 statistics would say 6e-8
    assert compute(scores([0.7] * 7)) == [0] * 7
    # better is better, and order does not matter
    up = compute(scores([0, 1, 0.5, 0.25]))
    assert up[1] > up[2] > up[3] > up[0]
    np.testing.assert_allclose(compute(scores([0.25, 0.5, 1, 0])), up[::-1], rtol=1e-12)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"reinforce_pp"}))
def test_groups_do_not_see_each_other(name):
    compute = load_advantage(name)
    both = compute(scores([1, 9, 0, 7, 0, 7], groups=["a", "b", "a", "b", "a", "b"]))
    assert both[::2] == compute(scores([1, 0, 0]))
    assert both[1::2] == compute(scores([9, 7, 7]))


@pytest.mark.parametrize("rewards", [[1.00000, 1.00001], [2.00000, 2.00001], [1e6, 1e6 + 1e-5]])
def test_near_equal_rewards_do_not_collapse(rewards):
    expected = [-0.6195, 0.6195]
    # at 1e6 the reward itself holds 1e-5 only to 1e-10
    np.testing.assert_allclose(grpo(scores(rewards)), expected, rtol=1e-4 if rewards[0] < 1e6 else 1e-3)


def test_the_zero_variance_filter_compares_values():
    assert is_constant([0.7] * 7)
    assert np.std(np.full(7, 0.7, np.float32)) > 0  # what a filter by deviation would keep
    assert not is_constant([0.7, 0.7 + 1e-16 + 2e-16])
    assert is_constant([1.0])


def test_the_baseline_counts_rollouts_not_turns():
    # A: reward 1 in one turn; B: reward 0 in nine turns, packed as nine rows: the baseline is 0.5, not 0.1
    assert load_advantage("centred")(scores([1, 0], tokens=[1, 9])) == [0.5, -0.5]


def test_whitening_is_over_the_global_batch():
    expected = [-1.342, -0.447, 0.447, 1.342]
    np.testing.assert_allclose(whiten([1, 2, 3, 4], [1, 1, 1, 1]), expected, rtol=1e-3)
    groups = ["a", "a", "b", "b"]  # per group or rank it would be -1, 1, -1, 1
    np.testing.assert_allclose(load_advantage("reinforce_pp")(scores([1, 2, 3, 4], groups)), expected, rtol=1e-3)
    # a token is one observation: a rollout of three tokens is one of one token three times
    thrice = load_advantage("reinforce_pp")(scores([1, 2, 2, 2]))
    assert load_advantage("reinforce_pp")(scores([1, 2], tokens=[1, 3])) == pytest.approx(thrice[:2])
    with pytest.raises(ValueError, match="needs tokens"):
        whiten([], [])


def test_returns_reach_over_tool_results():
    assert discounted_returns([0, 0, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1]) == [1, 1, 0, 0, 1, 1]
    # discounted by trained tokens, so the length of a tool's output changes nothing
    assert discounted_returns([0, 0, 0, 1], [1, 0, 0, 1], 0.5) == [0.5, 0, 0, 1]
    assert discounted_returns([0, 0, 1], [1, 0, 1], 0.5) == [0.5, 0, 1]
    # a KL penalty of 5 on an observation token changes nothing
    assert discounted_returns([0, -5, 1], [1, 0, 1]) == discounted_returns([0, 0, 1], [1, 0, 1])


def test_every_option_of_every_estimator_changes_something():
    from burnish.rollout.plugins import options_of

    other = {"eps": 0.5, "is_sample_std": False}
    for name, function in ADVANTAGES.items():
        for option in options_of(function):
            moved = load_advantage(name, {option: other[option]})(scores([1, 0, 0, 0.5]))
            assert moved != load_advantage(name)(scores([1, 0, 0, 0.5])), f"{name}.{option} is a dead knob"


def test_an_import_path_plugs_in(monkeypatch, tmp_path):
    (tmp_path / "my_advantages.py").write_text(
        "def best_only(scores, *, bonus=1.0):\n    return [bonus if r == max(scores.rewards) else 0.0 for r in scores.rewards]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_advantage("my_advantages:best_only", {"bonus": 2.0})(scores([0, 1])) == [0, 2]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (
            "grop",
            {},
            "advantage='grop': expected one of centred, dr_grpo, grpo, maxrl, reinforce_pp, rloo, or an import",
        ),
        ("no_such_module:f", {}, "cannot import 'no_such_module'"),
        ("burnish.rollout.advantage:nothing", {}, "has no attribute 'nothing'"),
        ("burnish.rollout.types:ABSENT_ROUTE", {}, "'ABSENT_ROUTE' is a int, expected something callable"),
        ("grpo", {"epsilon": 1.0}, "advantage='grpo' has no option 'epsilon': expected eps, is_sample_std"),
        ("centred", {"eps": 1.0}, "has no option 'eps': expected none"),
    ],
)
def test_a_wrong_name_is_one_clear_sentence(spec, options, message):
    with pytest.raises(UserError, match=message):
        load_advantage(spec, options)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[0.0] * (len(scores.rewards) + 1)", "gave 3 values for 2 rollouts"),
        ("[1.0] * len(scores.rewards)", "gave 1.0 to rollout 1"),
        ("[float('nan')] * len(scores.rewards)", "gave nan to rollout 0"),
    ],
)
def test_what_a_plug_in_returns_is_checked(monkeypatch, tmp_path, body, message):
    name = f"plug_in_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def f(scores):\n    return {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        load_advantage(f"{name}:f")(scores([1, 0], valid=[True, False]))


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="rollout 1 of group g: reward nan"):
        scores([1, math.nan])
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        load_advantage("maxrl")(scores([1, -1]))
    with pytest.raises(ValueError, match="lengths"):
        scores([1, 0], groups=["g"])
