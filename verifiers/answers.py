r"""Built-in reward functions for answers that can be compared: exact text, a number, a marked mathematical answer.

They are strict where a wrong answer could pass: "12" is not in "112", "-3" is not 3, 1/3 is not 0.333, an early
`\boxed{}` does not count once a later one says otherwise. What they cannot compare with raises: that is no reward of 0.
"""

import re
import unicodedata

from burnish.verifiers.quantity import plain_latex, read_quantity

HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
LEFT_SIDE = re.compile(r"([A-Za-z][A-Za-z0-9_]{0,7})\s*=\s*(?!=)(.+)", re.DOTALL)
SIZES = re.compile(r"\\(?:left|right|displaystyle|,|;|:|quad)(?![A-Za-z])")
SHORT_ARGUMENT = re.compile(r"\\(frac|sqrt)([0-9a-zA-Z])")
SHORT_FRACTION = re.compile(r"(\\frac\{[^{}]*\})([0-9a-zA-Z])")
SLASHED = re.compile(r"([+-]?[0-9a-zA-Z]+)/([0-9a-zA-Z]+)")


def exact(*, completion: str, answer: object, case_sensitive: bool = False) -> float:
    """1 when the whole completion is the answer (or one of a list), but for spaces, one full stop and, unless asked for, case."""

    def normal(text: str) -> str:
        # NFC, not NFKC: that one makes 102 out of a ten with a superscript two
        text = " ".join(unicodedata.normalize("NFC", text).split()).removesuffix(".")
        return text if case_sensitive else text.casefold()

    wanted = [normal(text_of(item)) for item in (answer if isinstance(answer, list) else [answer])]
    if not wanted or not all(wanted):
        raise ValueError("the answer is empty")
    return float(normal(completion) in wanted)


def number(*, completion: str, answer: object, tolerance: float = 0.0) -> float:
    r"""1 when the completion (its last `\boxed{}` or `####` line, else all of it) is the same number as the answer.

    Args:
        tolerance: largest difference, relative to the answer; 0 is equality.
    """
    wanted = read_quantity(said_in(text_of(answer)))
    if wanted is None:
        raise ValueError(f"the answer is no number: {text_of(answer)[:80]!r}")
    said = read_quantity(said_in(completion))
    return float(said is not None and wanted.is_same(said, checked(tolerance)))


def math(*, completion: str, answer: object, tolerance: float = 0.0) -> float:
    r"""1 when the last `\boxed{}` or `####` line of the completion says what the answer says; 0 without a mark.

    Numbers are compared as numbers, anything else as LaTeX in one spelling. The answer may be marked too.

    Args:
        tolerance: see `number`.
    """
    said = marked(completion)
    wanted = said_in(text_of(answer))
    return 0.0 if said is None else float(is_same(said, wanted, checked(tolerance)))


def text_of(answer: object) -> str:
    """Raises:
    ValueError: nothing that a text can be compared with.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(f"the answer is nothing to compare with: {answer!r}"[:200])
    return str(answer)


def checked(tolerance: float) -> float:
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be in [0, 1), got {tolerance}")
    return tolerance


def said_in(text: str) -> str:
    """The marked answer in a text, else all of it. An unfinished mark leaves nothing."""
    said = marked(text)
    return text if said is None else said


def marked(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `#### ` line of a text holds; None without one. Empty where a box was not closed."""
    box = last_box(text)
    hashes = max(HASHES.finditer(text), key=lambda match: match.start(), default=None)
    if hashes is not None and (box is None or hashes.start() > box[0]):
        return hashes[1].strip()
    return None if box is None else box[1]


def last_box(text: str) -> tuple[int, str] | None:
    """Where the last box starts, and what is in it."""
    match = max(BOXED.finditer(text), key=lambda match: match.start(), default=None)
    if match is None:
        return None
    depth = 1
    for place in range(match.end(), len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
        if depth == 0:
            return match.start(), text[match.end() : place].strip()
    return match.start(), ""


def is_same(said: str, wanted: str, tolerance: float = 0.0) -> bool:
    """One answer written in two ways. A number is only ever equal to a number."""
    said_side, said = without_left_side(said)
    wanted_side, wanted = without_left_side(wanted)
    if said_side and wanted_side and said_side != wanted_side:
        return False
    ours, theirs = read_quantity(wanted), read_quantity(said)
    if ours is not None and theirs is not None:
        return ours.is_same(theirs, tolerance)
    return ours is None and theirs is None and normal_latex(said) == normal_latex(wanted) != ""


def without_left_side(text: str) -> tuple[str, str]:
    """`x = 5` as ("x", "5"); a text that is no equation for one name as ("", text)."""
    match = LEFT_SIDE.fullmatch(plain_latex(text))
    return (match[1], match[2]) if match is not None and "=" not in match[2] else ("", text)


def normal_latex(text: str) -> str:
    """Without spaces and sizes, arguments in braces."""
    text = re.sub(r"\s+", "", SIZES.sub("", plain_latex(text)))
    text = SHORT_FRACTION.sub(r"\1{\2}", SHORT_ARGUMENT.sub(r"\\\1{\2}", text))
    slashed = SLASHED.fullmatch(text)
    return f"\\frac{{{slashed[1]}}}{{{slashed[2]}}}" if slashed else text
