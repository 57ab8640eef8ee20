"""Write a function of two numbers to a new file."""

from burnish.envs.synthesis.code import INTEGERS, SIGNS, Piece, constant, pairs, symbols, write_new
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: one operator; level 2: the product, and a constant."""
    rng = scene.rng
    names = rng.sample(INTEGERS, 2)
    # what is subtracted from what is for the instruction to say
    left, right = rng.sample(names, 2)
    if level == 1:
        words = f"{left} {rng.choice(tuple(SIGNS))} {right}"
    else:
        words = f"{left} times {right} {rng.choice(('plus', 'minus'))} {constant(rng)}"
    write_new(scene, names, Piece(words=words, source=symbols(words)), pairs(rng))
