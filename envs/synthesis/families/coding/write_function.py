"""Write a function of a number to a new file."""

from burnish.envs.synthesis.code import INTEGERS, arithmetic, numbers, write_new
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: one operator; level 2: two."""
    name = scene.rng.choice(INTEGERS)
    write_new(scene, (name,), arithmetic(scene.rng, name, level), numbers(scene.rng))
