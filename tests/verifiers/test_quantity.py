"""Numbers with units: every spelling of a number is that number, and nothing else is."""

import random
from fractions import Fraction

import pytest

from burnish.verifiers.quantity import read_quantity


def value(text):
    quantity = read_quantity(text)
    return None if quantity is None else quantity.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", 12), ("+12", 12), ("-3", -3), ("\u22123", -3), ("007", 7), (" 12. ", 12), ("0.5", "1/2"), (".5", "1/2"),
        ("-.5", "-1/2"), ("1,234", 1234), ("1,234,567.89", "123456789/100"), ("1{,}234", 1234), ("1\\,234\\,567", 1234567),
        ("10,\\!000", 10000), ("1e3", 1000), ("2.5E-1", "1/4"), ("3 \\times 10^{4}", 30000), ("3\\cdot10^4", 30000),
        ("1.5 \u00d7 10^-2", "3/200"), ("1/3", "1/3"), ("-1/3", "-1/3"), ("3 / 4", "3/4"), ("0.5/2", "1/4"),
        ("1,000/3", "1000/3"), ("\\frac{1}{3}", "1/3"), ("\\dfrac{1}{3}", "1/3"), ("\\tfrac12", "1/2"),
        ("-\\frac{7}{2}", "-7/2"), ("\\frac{-7}{2}", "-7/2"), ("1 1/2", "3/2"), ("-1 1/2", "-3/2"),
        ("3\\frac{1}{4}", "13/4"), ("3 \\frac{1}{4}", "13/4"), ("$5$", 5), ("\\(5\\)", 5), ("\\[ 5 \\]", 5), ("$18", 18),
        ("\\$18.50", "37/2"), ("-$5", -5), ("$-5", -5), ("50%", 50), ("50\\%", 50), ("45^\\circ", 45), ("45^{\\circ}", 45),
        ("5 million", 5_000_000), ("2.5 thousand dollars", 2500), ("18 dollars", 18), ("3 \\text{ cm}", 3), ("3\\,\\text{cm}", 3),
        ("5 km/h", 5), ("4 m^2", 4), ("4 square meters", 4), ("7 apples", 7),
        ("1e999", Fraction(10) ** 999),
    ],
)  # fmt: skip
def test_a_number_is_read(text, expected):
    assert value(text) == Fraction(expected)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ".", "-", "--3", "+-3", "- 3", "1,23", "12,34", "1,2345", "1234,567", "1,234,56", ",123", "1.2.3", "1 000",
        "1 2", "1, 2", "(1,234)", "3x", "3 x", "2i", "5M", "5k", "5 M", "3\\pi", "3 pi", "3\\sqrt{2}", "2^{10}", "10^3", "5!",
        "1/0", "\\frac{1}{0}", "1/2/3", "1 3/2", "1 -1/2", "x = 5", "5 = x", "5 or 6", "5 or six", "5 is wrong", "not 5",
        "5 and more words here", "five", "0x10", "1_000", "\u0661\u0662", "10\u00b2", "x\u2082", "3\u00bd", "\u00bd", "nan",
        "inf", "-inf", "infinity", "1e", "1e9999", "5 squared", "5 dozen", "\\frac{a}{b}", "\\frac{1}{x}", "$$", "5; drop",
        "9" * 300, "5\n6",
    ],
)  # fmt: skip
def test_what_is_no_number_is_none(text):
    assert value(text) is None


def test_spellings_of_random_numbers_agree():
    draw = random.Random(1)
    for _ in range(2000):
        sign, whole, digits = draw.choice(["", "-"]), draw.randrange(10 ** draw.randrange(1, 10)), draw.randrange(5)
        decimals = "".join(draw.choice("0123456789") for _ in range(digits))
        tail = f".{decimals}" if decimals else ""
        truth = Fraction(f"{sign}{whole}{tail}")
        spellings = [
            f"{sign}{whole}{tail}",
            f"{sign}{whole:,}{tail}",
            f"{sign}0{whole}{tail}",
            f"${sign}{whole:,}{tail}$",
        ]
        spellings += [f"{sign}{whole}{tail or '.'}000".replace(".000", ".000"), f" {sign}{whole}{tail} apples"]
        spellings += [f"\\frac{{{sign}{whole * 10**digits + int(decimals or 0)}}}{{{10**digits}}}"]
        for text in spellings:
            assert value(text) == truth, text


def test_another_number_is_never_the_same():
    """Changing one character of a number never leaves its value, unless it is the same number again by value."""
    draw = random.Random(2)
    for _ in range(2000):
        text = f"{draw.choice(['', '-'])}{draw.randrange(1, 10**6)}.{draw.randrange(1000):03d}"
        place = draw.randrange(len(text))
        changed = text[:place] + draw.choice("0123456789-,./ ex") + text[place + draw.randrange(2) :]
        try:
            truth = Fraction(changed) if "," not in changed and " " not in changed and "/" not in changed else None
        except (ValueError, ZeroDivisionError):
            continue
        if truth is not None and truth != Fraction(text):
            assert value(changed) != Fraction(text), (text, changed)


def test_units_agree_where_both_are_given():
    def same(left, right):
        ours, theirs = read_quantity(left), read_quantity(right)
        assert ours is not None
        assert theirs is not None
        return ours.is_same(theirs)

    for left, right in (("5 km", "5"), ("$18", "18"), ("18 dollars", "$18"), ("1 apple", "1 apples"), ("50%", "50 percent"),
                        ("90^\\circ", "90 degrees"), ("4 cm^2", "4 cm\u00b2"), ("4 \\text{ cm}^2", "4 cm^2")):  # fmt: skip
        assert same(left, right), (left, right)
        assert same(right, left), (left, right)
    for left, right in (
        ("5 km", "5 m"),
        ("$18", "18 euros"),
        ("50%", "$50"),
        ("4 cm^2", "4 cm"),
        ("5 km", "6"),
        ("5 kg", "-5 kg"),
    ):
        assert not same(left, right), (left, right)
        assert not same(right, left), (left, right)


def test_tolerance_is_relative_to_the_answer():
    third, close, zero, small = (read_quantity(text) for text in ("1/3", "0.333", "0", "1e-9"))
    assert not third.is_same(close)
    assert third.is_same(close, 1e-2)
    assert not third.is_same(close, 1e-4)
    assert not zero.is_same(small, 0.5), "nothing but 0 is near 0"
    assert not read_quantity("1000000").is_same(read_quantity("1000001"))
