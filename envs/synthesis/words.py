"""The vocabulary of the generated tasks: compound names such as `amber-wheel` and `amber_size`, and which split may use which.

Every first word is one token of the DeepSeek tokenizer with and without a leading space; every second word is one
token behind a hyphen (`-wheel`), every word for code behind an underscore (`_size`). So a compound is two tokens wherever
it stands. No word is the beginning or end of another of its list, so one compound never hides inside a longer one. A
small policy can copy such names without learning to spell. tests/envs/test_synthesis_families.py checks all of it on
the real tokenizer.

Pairs are divided by a hash between the splits, and demonstrations have names of their own: a held-out name cannot occur in a
training task, and no name of a task in a demonstration, by construction.
"""

import hashlib
import random
import re

_FIRST = """
    amber blue bold bright broad civil clean clear cold cool dark deep digital direct double dry early easy
    empty equal extra fair fine flat formal fresh full global gold grand gray great green happy hard heavy
    hidden hot ideal inner iron joint large late little local long major minor mixed modern native odd orange
    outer perfect plain plastic poor pretty prime pure quick quiet rare raw ready real red rich rough round
    safe sharp short simple slow small smart social soft solid special steady strong thin tiny upper urban
    valid vast virtual wet white whole wide wild wise yellow young
"""
_SECOND = """
    air arm ball band bar beam bed block board body bond book box brain button card chain chair chip circle
    city clock cloud color cycle door drop earth edge engine eye family field film filter fire flight floor
    food foot frame fuel game gas glass group hand home hour house human icon lab land leaf letter mail map
    market metal meter money month night office pack party piece plane player pot power road rock room scale
    school screen song space speed square stage star stream team town track tree wall water wave web week
    wheel wing worker world yard year
"""
_CODE = """
    amount area base board box buffer card color column cost count date depth edge event factor field flag frame
    grid group height index item key label layer length level limit line list map mask node number offset order
    size total action address block body book button category client command config content distance element
    email filter folder game handler head helper history host image input lock match matrix menu message method
    month object option output page parent password path pattern player point position price process product
    project query queue rate record stack result role root row sample session shape source value
"""

FIRST_WORDS = tuple(_FIRST.split())
SECOND_WORDS = tuple(_SECOND.split())
CODE_WORDS = tuple(_CODE.split())

SPLITS = ("train", "heldout")
DEMONSTRATION = "demonstration"
"""Where trajectories without a task folder take their names: what RL trains on is then new to a policy that imitates them."""
SHARES = (DEMONSTRATION, DEMONSTRATION, *SPLITS)
COMPOUND = re.compile(r"[a-z]+[-_][a-z]+")


def split_of(compound: str) -> str:
    """Where alone this compound may occur, in either spelling: in demonstrations, or in the tasks of one split."""
    return SHARES[hashlib.sha256(compound.replace("_", "-").encode()).digest()[0] % len(SHARES)]


class NameSource:
    """Draws compounds of one split for one task; no word is drawn twice, so a name is known by its first word."""

    def __init__(self, rng: random.Random, split: str, num_words: int = len(FIRST_WORDS) + len(SECOND_WORDS)) -> None:
        """
        Args:
            rng: the task's own generator.
            split: `train`, `heldout` or `demonstration`.
            num_words: how many words to draw from, half first and half second words; at least 80.
        """
        if split not in SHARES:
            raise ValueError(f"split must be one of {', '.join(sorted(set(SHARES)))}, got {split!r}")
        if not 80 <= num_words <= len(FIRST_WORDS) + len(SECOND_WORDS):
            raise ValueError(f"num_words must be 80..{len(FIRST_WORDS) + len(SECOND_WORDS)}, got {num_words}")
        self._rng = rng
        self._split = split
        self._first = list(FIRST_WORDS[: num_words // 2])
        self._second = {"-": list(SECOND_WORDS[: num_words // 2]), "_": list(CODE_WORDS[: num_words // 2])}

    def draw(self, joint: str = "-") -> str:
        """A compound of the split, made of two words that this task has not used yet; `_` joins an identifier."""
        seconds = self._second[joint]
        while True:
            first, second = self._rng.choice(self._first), self._rng.choice(seconds)
            if split_of(f"{first}-{second}") == self._split:
                self._first.remove(first)
                seconds.remove(second)
                return f"{first}{joint}{second}"
