"""Write a function of a list of numbers to a new file."""

from burnish.envs.synthesis.code import LIST_FUNCTIONS, LIST_VALUES, Piece, constant, lists, write_new
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: a value or a list; level 2: two values, or a value and a constant, added or subtracted."""
    rng = scene.rng
    if level == 1:
        words, source = rng.choice(list(LIST_FUNCTIONS.items()))
    else:
        (words, source), (other, other_source) = rng.sample(list(LIST_VALUES.items()), 2)
        if rng.random() < 0.5:
            other = other_source = str(constant(rng))
        word, sign = rng.choice((("plus", "+"), ("minus", "-")))
        words, source = f"{words} {word} {other}", f"{source} {sign} {other_source}"
    write_new(scene, ("a",), Piece(words=words, source=source), lists(rng))
