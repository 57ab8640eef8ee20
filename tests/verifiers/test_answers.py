r"""Built-in reward functions: what counts as the answer, and that nothing near it does."""

import random

import pytest

from burnish.verifiers import answers
from burnish.verifiers.answers import exact, is_same, marked


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("Paris", "paris", 1), (" Paris.\n", "Paris", 1), ("new  york", "New York", 1), ("Paris, France", "Paris", 0),
        ("12", "112", 0), ("112", "12", 0), ("-3", "3", 0), ("", "Paris", 0), ("10\u00b2", "102", 0), ("12", 12, 1),
        ("b", ["a", "B"], 1), ("c", ["a", "b"], 0), ("e\u0301", "\u00e9", 1),
    ],
)  # fmt: skip
def test_exact(completion, answer, reward):
    assert exact(completion=completion, answer=answer) == reward


def test_exact_with_case():
    assert exact(completion="a", answer="A", case_sensitive=True) == 0.0
    assert exact(completion="A", answer="A", case_sensitive=True) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("12", "12", 1), ("12.0", "12", 1), ("12", "112", 0), ("112", "12", 0), ("1 12", "12", 0), ("-3", "3", 0), ("3", "-3", 0),
        ("1,234", "1234", 1), ("$1,234.00", "1234", 1), ("0.333", "1/3", 0), ("\\frac{1}{3}", "1/3", 1), ("twelve", "12", 0),
        ("The answer is 12", "12", 0), ("so #### 12", "12", 0), ("so\n#### 12", "12", 1), ("\\boxed{12} of 15", "12", 1),
        ("12", "He has 5.\nThen 7.\n#### 12", 1), ("5", "He has 5.\nThen 7.\n#### 12", 0), ("12", 12, 1), ("0.5", 0.5, 1),
        ("1e-7", 1e-07, 1), ("", "12", 0),
    ],
)  # fmt: skip
def test_number(completion, answer, reward):
    assert answers.number(completion=completion, answer=answer) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        # F03 of the public cases, its arithmetic
        ("\\boxed{\\frac{1}{3}}", "\\frac{1}{3}", 1),
        ("so it is $\\boxed{\\dfrac13}$.", "\\frac{1}{3}", 1),
        ("\\boxed{0.333}", "\\frac{1}{3}", 0),
        ("\\frac{1}{3}", "\\frac{1}{3}", 0),  # not marked
        ("\\boxed{9^{9^{9^{9}}}}", "12", 0),
        ("\\boxed{12}", "\\boxed{12}", 1),
        ("\\boxed{12}", "72 / 6 = <<72/6=12>>12\n#### 12", 1),
        ("12\n#### 12", "\\boxed{12}", 1),
        ("#### 18 dollars", "18", 1),
        ("#### $18", "18", 1),
        ("#### 1,800", "1800", 1),
        ("#### 180", "18", 0),
        ("#### -18", "18", 0),
        ("####18", "18", 1),
        ("a #### 18", "18", 0),  # not at the start of a line
        ("\\boxed{3} no: \\boxed{4}", "3", 0),
        ("\\boxed{3} no: \\boxed{4}", "4", 1),
        ("\\boxed{3}\n#### 4", "3", 0),
        ("#### 4\n\\boxed{3}", "3", 1),
        ("\\boxed{4} then \\boxed{3", "4", 0),  # cut off in the middle: the last one counts
        ("\\boxed{\\boxed{5}}", "5", 1),
        ("\\boxed{x = 5}", "5", 1),
        ("\\boxed{5}", "x=5", 1),
        ("\\boxed{y = 5}", "x=5", 0),
        ("\\boxed{3x}", "3", 0),
        ("\\boxed{5M}", "5", 0),
        ("\\boxed{(1, 2)}", "(1,2)", 1),
        ("\\boxed{\\left(1, 2\\right)}", "(1,2)", 1),
        ("\\boxed{(1, 2)}", "(2,1)", 0),
        ("\\boxed{1, 234}", "1,234", 0),
        ("\\boxed{\\text{(B)}}", "(B)", 1),
        ("\\boxed{B}", "b", 0),
        ("\\boxed{\\sqrt2}", "\\sqrt{2}", 1),
        ("\\boxed{\\sqrt{2}}", "1.414", 0),
        ("\\boxed{x/2}", "\\frac{x}{2}", 1),
        ("\\boxed{}", "5", 0),
        ("", "5", 0),
    ],
)  # fmt: skip
def test_math(completion, answer, reward):
    assert answers.math(completion=completion, answer=answer) == reward


@pytest.mark.parametrize("answer", ["", "  ", None, True, [1], {"a": 1}])
def test_an_answer_that_nothing_could_equal_is_no_reward(answer):
    for function in (exact, answers.number, answers.math):
        if answer == [1] and function is exact:
            continue  # a list of accepted answers
        with pytest.raises(ValueError, match="answer"):
            function(completion="\\boxed{5}", answer=answer)
    with pytest.raises(ValueError, match="the answer is no number: 'a few'"):
        answers.number(completion="5", answer="a few")
    with pytest.raises(ValueError, match="tolerance must be"):
        answers.number(completion="5", answer="5", tolerance=-1.0)


def test_random_answers_match_themselves_and_nobody_else():
    draw = random.Random(3)

    def answer():
        kind = draw.randrange(4)
        number = draw.choice(["", "-"]) + str(draw.randrange(1, 10 ** draw.randrange(1, 7)))
        if kind == 0:
            return number
        if kind == 1:
            return f"{number}.{draw.randrange(100):02d}"
        if kind == 2:
            return f"\\frac{{{number}}}{{{draw.randrange(2, 99)}}}"
        return f"({number}, {draw.randrange(99)})"

    def plain(text):
        """The value by another way: Python's own arithmetic."""
        if text.startswith("("):
            return tuple(text[1:-1].split(", "))
        if text.startswith("\\frac"):
            top, bottom = text.removeprefix("\\frac{")[:-1].split("}{")
            return float(top) / float(bottom)
        return float(text)

    drawn = [answer() for _ in range(150)]
    for left in drawn:
        assert answers.math(completion=f"thus \\boxed{{{left}}}.", answer=left) == 1.0
        for right in drawn:
            assert is_same(left, right) == (plain(left) == plain(right)), (left, right)


def test_more_text_around_a_wrong_answer_never_helps():
    for filler in ("12", "12 12 12", "12\n", "#12", "### 12", "boxed{12}", "\\boxed12", "12}", "{12}", "\\boxed {1}2"):
        assert answers.math(completion=f"{filler} \\boxed{{11}}", answer="12") == 0.0
        assert answers.number(completion=f"{filler}\n#### 11", answer="12") == 0.0


def test_the_last_mark_is_found_quickly():
    assert marked("\\boxed{" * 3000 + "5" + "}" * 3000) == "5"
    assert marked("\\boxed{" * 3000) == ""
    assert marked("nothing here") is None
