r"""Reads a number with its unit, exactly: signs, thousands' commas, decimals, fractions, mixed numbers, powers of ten, LaTeX.

A text is a number only as a whole: "112" is never 12, "1,23" and "3x" are no numbers, "1/3" is not 0.333. Values are
fractions, so equality means equality. No symbolic algebra: `\sqrt{2}` is no number here.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 200
"""A longer text is no number that anybody meant."""
CURRENCIES = "$\u20ac\u00a3"

WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]+)?|\.[0-9]+)"
PREFIX = re.compile(rf"(?P<before>[{CURRENCIES}]?)(?P<sign>[+-]?)(?P<after>[{CURRENCIES}]?)")
# 3 1/2, 3\frac{1}{2}: the whole number of a mixed one
MIXED = re.compile(rf"(?P<whole>{WHOLE})(?:\s+|(?=\\frac))")
RATIOS = (
    re.compile(rf"\\frac\s*\{{\s*(?P<top>[+-]?{DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>{DECIMAL})\s*\}}"),
    re.compile(r"\\frac\s*(?P<top>[0-9])\s*(?P<bottom>[0-9])"),
    re.compile(rf"(?P<top>{DECIMAL})\s*/\s*(?P<bottom>{DECIMAL})"),
)
PLAIN = re.compile(
    rf"(?P<digits>{DECIMAL})"
    r"(?:[eE](?P<e>[+-]?[0-9]{1,3})|\s*(?:\\times|\\cdot|\*|\u00d7)\s*10\s*\^\s*\{?(?P<ten>[+-]?[0-9]{1,3})\}?)?"
)

WRAPPERS = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
# LaTeX's thin spaces between groups of digits; elsewhere they are spaces
THIN = re.compile(r"(?<=[0-9])\\[,;:](?=[0-9]{3}(?![0-9]))")
REPLACED = {
    "\u2212": "-", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\\!": "", "{,}": ",", "\\dfrac": "\\frac",
    "\\tfrac": "\\frac", "\\%": "%", "\\$": "$", "^\\circ": "\u00b0", "^{\\circ}": "\u00b0", "~": " ", "\\ ": " ",
    "\\,": " ", "\\;": " ", "\\:": " ",
}  # fmt: skip
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")

UNIT = re.compile(rf"[%\u00b0{CURRENCIES}]|[A-Za-z\u00b5]+(?:/[A-Za-z]+)?(?:\^[23])?")
SAME_UNIT = {
    "percent": "%", "dollar": "$", "us dollar": "$", "usd": "$", "euro": "\u20ac", "eur": "\u20ac", "pound": "\u00a3",
    "deg": "\u00b0", "degree": "\u00b0",
}  # fmt: skip
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten that are written as a word."""
# glued to the number, or a single letter, a word is a variable or a scale (3x, 5M) unless it is one of these
GLUED = frozenset(
    (
        *(
            "%",
            "\u00b0",
            "m",
            "s",
            "g",
            "l",
            "L",
            "h",
            "km",
            "cm",
            "mm",
            "nm",
            "kg",
            "mg",
            "lb",
            "lbs",
            "oz",
            "ft",
            "in",
        ),
        *(
            "yd",
            "mi",
            "ml",
            "cl",
            "kw",
            "kwh",
            "hz",
            "khz",
            "mhz",
            "ghz",
            "kb",
            "gb",
            "tb",
            "mph",
            "min",
            "sec",
            "hr",
            "hrs",
        ),
    )
)
# words behind a number that make another number, or a sentence, of it
NO_UNIT = frozenset(
    (
        *(
            "pi",
            "tau",
            "phi",
            "squared",
            "cubed",
            "factorial",
            "half",
            "halves",
            "third",
            "thirds",
            "quarter",
            "quarters",
        ),
        *(
            "dozen",
            "point",
            "plus",
            "minus",
            "negative",
            "or",
            "and",
            "not",
            "is",
            "are",
            "was",
            "to",
            "over",
            "mod",
            "but",
        ),
        *("no", "wrong", "choose", "infinity", "inf", "nan", "e"),
    )
)
POWERS = {"^{2}": "^2", "^{3}": "^3", "\u00b2": "^2", "\u00b3": "^3", " ^": "^"}
LEADING = frozenset(("square", "cubic", "sq", "us"))
"""Words that a second one may follow."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number and what it counts."""

    value: Fraction
    unit: str
    """In one spelling for singular and plural; empty where none is given."""

    def is_same(self, other: "Quantity", tolerance: float = 0.0) -> bool:
        """Equal value; units agree where both have one.

        Args:
            tolerance: largest difference relative to this value.
        """
        if self.unit and other.unit and self.unit != other.unit:
            return False
        return abs(self.value - other.value) <= abs(self.value) * Fraction(tolerance)


def plain_latex(text: str) -> str:
    """One spelling for what LaTeX and typographers write in several ways; wrappers of a formula are taken off."""
    text = text.strip().removesuffix(".").strip()
    for before, after in WRAPPERS:
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            text = text[len(before) : -len(after)].strip()
            break
    text = THIN.sub("", text)
    for before, after in REPLACED.items():
        text = text.replace(before, after)
    return TEXT.sub(lambda match: f" {match[1]} ", text).strip().removesuffix(".").strip()


def read_quantity(text: str) -> Quantity | None:
    """The number that the whole of `text` is; None when it is anything else."""
    if len(text) > MAX_CHARS:
        return None
    text = plain_latex(text)
    prefix = PREFIX.match(text)
    assert prefix is not None, "every part of it may be missing"
    found = read_value(text, prefix.end())
    if found is None or (prefix["before"] and prefix["after"]):
        return None
    value, end = found
    tail = read_unit(text[end:])
    if tail is None:
        return None
    unit, power = tail
    currency = prefix["before"] or prefix["after"]
    if currency and unit and unit != currency:
        return None
    value *= Fraction(10) ** power
    return Quantity(value=-value if prefix["sign"] == "-" else value, unit=unit or currency)


def read_value(text: str, start: int) -> tuple[Fraction, int] | None:
    """The unsigned number at `start`, and where it ends."""
    mixed = MIXED.match(text, start)
    if mixed is not None and (ratio := read_ratio(text, mixed.end())) is not None:
        part, end = ratio
        # 1 1/2; but 1 3/2 is no mixed number
        return (fraction(mixed["whole"]) + part, end) if 0 <= part < 1 else None
    if (ratio := read_ratio(text, start)) is not None:
        return ratio
    plain = PLAIN.match(text, start)
    if plain is None:
        return None
    return fraction(plain["digits"]) * Fraction(10) ** int(plain["e"] or plain["ten"] or 0), plain.end()


def read_ratio(text: str, start: int) -> tuple[Fraction, int] | None:
    for form in RATIOS:
        match = form.match(text, start)
        if match is not None and fraction(match["bottom"]):
            return fraction(match["top"]) / fraction(match["bottom"]), match.end()
    return None


def fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def read_unit(text: str) -> tuple[str, int] | None:
    """The unit behind a number (empty for none) and the power of ten in it; None when it is something else."""
    for before, after in POWERS.items():
        text = text.replace(before, after)
    words = text.split()
    if not words:
        return "", 0
    if not all(UNIT.fullmatch(word) and word.lower() not in NO_UNIT for word in words):
        return None
    is_glued, power = not text[0].isspace(), 0
    if words[0].lower() in SCALES and not is_glued:
        power = SCALES[words.pop(0).lower()]
        if not words:
            return "", power
    if len(words) > 3 or (len(words) > 1 and words[0].lower() not in LEADING and words[1].lower() != "per"):
        return None
    first = re.split(r"[\^/]", words[0])[0]
    if len(first) > 1:
        first = first.lower()
    if (is_glued or len(first) == 1) and first not in GLUED and first not in tuple(CURRENCIES):
        return None
    unit = " ".join(singular(word.lower()) for word in words)
    return SAME_UNIT.get(unit, unit), power


def singular(word: str) -> str:
    return word if len(word) < 3 or word.endswith("ss") else word.removesuffix("s")
