"""Write a function of a text to a new file."""

from burnish.envs.synthesis.code import TEXT_METHODS, Piece, texts, write_new
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: one method; level 2: a word after it."""
    choices = {words: f"s.{method}()" for words, method in TEXT_METHODS.items()} | {"in reverse order": "s[::-1]"}
    how, source = scene.rng.choice(list(choices.items()))
    words = f"s {how}"
    if level == 2:
        end = scene.compound()
        words, source = f"{words} and then {end} after a space", f'{source} + " {end}"'
    write_new(scene, ("s",), Piece(words=words, source=source), texts(scene.rng))
