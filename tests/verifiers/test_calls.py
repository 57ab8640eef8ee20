"""How reward functions of three kinds are called, what they may return, and what is refused before anything is graded."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import reward_functions as functions

from burnish.verifiers.calls import Call, CallError, form_of, rewards_of
from burnish.verifiers.config import Style

CHAT = [{"role": "user", "content": "2 + 2"}]
CALL = Call(
    completion="4", prompt="2 + 2", answer="4", data_source="sums", extra={"level": 1},
    columns={"answer": "4", "level": 1, "solution": "4"},
)  # fmt: skip


def reward(function, call=CALL, style=Style.auto, **options):
    return form_of(function, style, options).rewards(call)


def test_each_kind_gets_what_it_declares():
    assert reward(functions.plain) == {"reward": 1.0, "length": 1.0}
    assert reward(functions.plain, bonus=0.5)["reward"] == 1.5
    assert reward(functions.truth) == {"reward": 1.0}
    assert reward(functions.compute_score) == {"score": 1.0, "acc": 1.0, "reward": 1.0}
    assert reward(functions.solution_reward) == {"reward": 1.0}
    assert reward(functions.length_reward, Call(completion="four", prompt="a")) == {"reward": 0.4}
    assert reward(functions.patient) == {"reward": 1.0}
    assert reward(functions.instance) == {"reward": 1.0}


def test_trl_completions_have_the_form_of_the_prompt():
    def seen(prompts, completions, **columns):
        calls.append((prompts, completions, columns))
        return [0.0]

    calls = []
    reward(seen)
    reward(seen, Call(completion="4", prompt=CHAT))
    assert calls == [
        (["2 + 2"], ["4"], {"answer": ["4"], "level": [1], "solution": ["4"]}),
        ([CHAT], [[{"role": "assistant", "content": "4"}]], {}),
    ]
    assert (
        reward(functions.solution_reward, Call(completion="4", prompt=CHAT, columns={"solution": "4"}))["reward"] == 1.0
    )


@pytest.mark.parametrize(
    ("function", "style"),
    [
        (functions.plain, Style.plain), (functions.truth, Style.plain), (functions.compute_score, Style.verl),
        (functions.solution_reward, Style.trl), (functions.length_reward, Style.trl),
    ],
)  # fmt: skip
def test_a_function_says_by_its_parameters_how_it_is_called(function, style):
    assert form_of(function, Style.auto, {}).style is style


def test_what_a_function_needs_of_the_prompts_is_known_before():
    needs = {
        f: form_of(f, Style.auto, {}).needs_answer for f in (functions.plain, functions.truth, functions.compute_score)
    }
    assert all(needs.values())
    assert not form_of(functions.by_length, Style.auto, {}).needs_answer
    assert not form_of(functions.solution_reward, Style.auto, {}).needs_answer
    assert form_of(functions.solution_reward, Style.auto, {}).wanted_columns == ["solution"]


@pytest.mark.parametrize(
    ("function", "style", "options", "says"),
    [
        (functions.Scorer, Style.auto, {}, "is a class, not a function"),
        (functions.not_a_function, Style.auto, {}, "is a int, not a function"),
        (functions.by_position, Style.auto, {}, "wants completion by position"),
        (functions.says_nothing, Style.auto, {}, "does not say how it is called; set grading.style"),
        (functions.wants_more, Style.auto, {}, "wants the argument difficulty; grading.style=plain gives completion, answer"),
        (functions.plain, Style.verl, {}, "has no parameter solution_str, in which grading.style=verl gives the completion"),
        (functions.plain, Style.auto, {"bonsu": 1}, "has no parameter bonsu, which grading.options gives"),
        (functions.plain, Style.auto, {"answer": 1}, "gets answer from the run; grading.options must not give it"),
        (max, Style.auto, {}, "does not show its parameters"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused(function, style, options, says):
    with pytest.raises(CallError) as caught:
        form_of(function, style, options)
    assert says in str(caught.value)


def test_a_style_can_be_said():
    assert reward(functions.says_nothing, style=Style.plain) == {"reward": 1.0}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1, 1.0), (0.25, 0.25), (True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.bool_(True), 1.0),
        (np.array(0.5), 0.5), (np.array([0.5]), 0.5), (Fraction(1, 4), 0.25), ({"reward": 1}, 1.0), ({"score": 0.5, "acc": 1}, 0.5),
        ({"accuracy": 1}, 1.0), ({"reward": 0, "score": 1}, 0.0), ({"score": 1.0, "pred": None, "why": "ok"}, 1.0), (-1, -1.0),
    ],
)  # fmt: skip
def test_a_reward_is_one_finite_number(result, expected):
    assert rewards_of(result)["reward"] == expected


@pytest.mark.parametrize(
    "result",
    [
        None, "1", "", [1.0], (1.0,), math.nan, math.inf, -math.inf, np.nan, np.float32("nan"), np.array([1.0, 2.0]), 10**400,
        Decimal("1"), object(), 1j, {}, {"reward": None}, {"reward": "1"}, {"score": math.nan}, {"reward": 1, "part": math.nan},
        {"a": 1, "b": 2}, {"why": "because"}, {"reward": [1]}, b"1",
    ],
)  # fmt: skip
def test_anything_else_is_no_reward(result):
    with pytest.raises(CallError, match="returned"):
        rewards_of(result)


@pytest.mark.parametrize("result", [1.0, [1.0, 1.0], [], [None], None, "1", [math.nan], ["1"]])
def test_a_trl_function_returns_a_list_of_one(result):
    def function(completions):
        return result

    with pytest.raises(CallError, match="returned"):
        reward(function)


def test_trl_rewards_may_come_as_an_array():
    def function(completions):
        return np.array([0.5])

    assert reward(function) == {"reward": 0.5}
