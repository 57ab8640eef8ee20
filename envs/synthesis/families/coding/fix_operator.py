"""Look, then act: a function uses a wrong operator."""

from burnish.envs.synthesis.code import COMPARISONS, INTEGERS, SIGNS, constant, define, numbers, repair
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: arithmetic; level 2: a comparison."""
    rng = scene.rng
    name, number = rng.choice(INTEGERS), constant(rng)
    if level == 1:
        word, right = rng.choice(list(SIGNS.items()))
        # a star would mean something in a pattern
        wrong = rng.choice([sign for sign in "+-" if sign != right])
        words, source, near = f"{name} {word} {number}", f"{name} {wrong} {number}", []
    else:
        word, right = rng.choice(list(COMPARISONS.items()))
        wrong = rng.choice([sign for sign in COMPARISONS.values() if sign != right])
        yes = constant(rng)
        no = constant(rng, (yes,))
        words = f"{yes} if {name} {word} {number} else {no}"
        source, near = f"{yes} if {name} {wrong} {number} else {no}", [number]
    function = scene.identifier()
    path = scene.create([define(function, name, source)], scene.new_module())
    scene.say(
        f"The function {function} in {path} must return {words}. Fix it.",
        f"Fix the operator of {function} in {path}. It must return {words}.",
    )
    scene.run(f"cat {path}", scene.lines(path))
    repair(scene, path, f" {wrong} ", f" {right} ")
    scene.test(path, function, numbers(rng, near))
