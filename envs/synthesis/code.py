"""Small pieces of Python, each with the words that ask for it, and arguments that tell it from its neighbours.

Parameters are single letters. Integers are called `x`, `k` or `z`, because no word of the vocabulary begins with one of
them: a pattern such as ` k` matches nothing else in a file.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.envs.synthesis.scene import Scene
from burnish.envs.synthesis.words import CODE_WORDS, FIRST_WORDS

INTEGERS = ("x", "k", "z")
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
COMPARISONS = {"is over": ">", "is under": "<", "is": "=="}
TEXT_METHODS = {
    "in upper case": "upper",
    "in lower case": "lower",
    "in title case": "title",
    "without spaces around it": "strip",
}
# of a list `a`; those with one value come first
LIST_VALUES = {
    "the largest item of a": "max(a)",
    "the smallest item of a": "min(a)",
    "the sum of a": "sum(a)",
    "the length of a": "len(a)",
    "the first item of a": "a[0]",
    "the last item of a": "a[-1]",
}
LIST_FUNCTIONS = {**LIST_VALUES, "a in sorted order": "sorted(a)", "a in reverse order": "a[::-1]"}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """An expression, in words and in Python."""

    words: str
    source: str


def constant(rng: random.Random, other_than: Iterable[int] = ()) -> int:
    """2 to 20: one token, and no neutral element."""
    return rng.choice([number for number in range(2, 21) if number not in other_than])


def arithmetic(rng: random.Random, name: str, level: int = 1) -> Piece:
    """`x plus 3`; level 2: `x times 4 minus 3`."""
    if level == 2:
        factor = constant(rng)
        name, sign = f"{name} times {factor}", rng.choice(("plus", "minus"))
    else:
        sign = rng.choice(tuple(SIGNS))
    number = constant(rng)
    words = f"{name} {sign} {number}"
    return Piece(words=words, source=symbols(words))


def symbols(words: str) -> str:
    """`x times 4 minus 3` as `x * 4 - 3`."""
    return " ".join(SIGNS.get(word, word) for word in words.split())


def define(function: str, parameters: str, source: str) -> str:
    """The line of code; `parameters` as in `x, k`."""
    return f"def {function}({parameters}): return {source}"


def numbers(rng: random.Random, near: Sequence[int] = ()) -> list[list[Any]]:
    """Arguments for a function of an integer; `near` are numbers at which it could change."""
    around = [number + step for number in near for step in (-1, 0, 1)]
    return [[number] for number in [*around, *rng.sample(range(-40, 0), 2), *rng.sample(range(21, 90), 3)]]


def pairs(rng: random.Random) -> list[list[Any]]:
    """Arguments for a function of two integers."""
    return [rng.sample(range(-40, 90), 2) for _ in range(4)]


def lists(rng: random.Random, near: Sequence[int] = ()) -> list[list[Any]]:
    """Arguments for a function of a list of integers: unsorted, the extremes inside; `near` as for `numbers`."""
    found = []
    for _ in range(3):
        items = sorted({*rng.sample(range(-40, 90), 5), *(number + step for number in near for step in (-1, 0, 1))})
        inner = [items[0], items[-1], *items[2:-2]]
        rng.shuffle(inner)
        found.append([[items[-2], *inner, items[1]]])
    return found


def texts(rng: random.Random) -> list[list[Any]]:
    """Arguments for a function of a text: both cases, spaces inside and around."""
    words = [word for _ in range(3) for word in (rng.choice(FIRST_WORDS), rng.choice(CODE_WORDS))]
    return [
        [f"  {words[0]} {words[1].upper()}  "],
        [f"{words[2].swapcase()} a{words[3].capitalize()} "],
        [f" {words[4].capitalize()} {words[5]}b"],
    ]


def ask(scene: Scene, function: str, of: str, path: str, words: str) -> None:
    """The sentences that ask for a function in a new file."""
    scene.say(
        f"Write the function {function} of {of} to {path}. It returns {words}.",
        f"Make a new file {path} that defines {function} of {of} as {words}.",
        f"The new file {path} must define {function} of {of} as {words}.",
    )


def write_new(scene: Scene, of: Sequence[str], piece: Piece, arguments: list[list[Any]]) -> None:
    """Everything about a task whose answer is one function in a new file."""
    function, path = scene.identifier(), scene.new_module()
    ask(scene, function, " and ".join(of), path, piece.words)
    line = define(function, ", ".join(of), piece.source)
    scene.run(f"echo '{line}' > {path}")
    scene.write(path, (line,))
    scene.test(path, function, arguments)


def repair(scene: Scene, path: str, old: str, new: str, flag: str = "") -> None:
    """The oracle replaces `old`, in which a pattern would mean no more, with `new`: once a line or (`g`) everywhere."""
    scene.run(f"sed -i 's/{old}/{new}/{flag}' {path}")
    scene.write(path, [line.replace(old, new, -1 if flag else 1) for line in scene.lines(path)])
