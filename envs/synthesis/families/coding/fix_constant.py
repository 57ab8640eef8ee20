"""Change the constant of a function."""

from burnish.envs.synthesis.code import INTEGERS, SIGNS, constant, define, numbers, repair, symbols
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: the instruction says what stands there; level 2: look, then act."""
    rng = scene.rng
    name, word = rng.choice(INTEGERS), rng.choice(tuple(SIGNS))
    wrong = constant(rng)
    right = constant(rng, (wrong,))
    function = scene.identifier()
    path = scene.create([define(function, name, symbols(f"{name} {word} {wrong}"))], scene.new_module())
    if level == 1:
        scene.say(
            f"The function {function} in {path} must return {name} {word} {right}, not {name} {word} {wrong}.",
            f"Change the number {wrong} to {right} in the function {function} of {path}.",
        )
    else:
        scene.say(
            f"The function {function} in {path} must return {name} {word} {right}. Fix the number.",
            f"Fix the number in {function} of {path}. It must return {name} {word} {right}.",
        )
        scene.run(f"cat {path}", scene.lines(path))
    repair(scene, path, f" {wrong}", f" {right}")
    scene.test(path, function, numbers(rng))
