"""Look, then act: a function computes its value and does not return it."""

from burnish.envs.synthesis.code import INTEGERS, arithmetic, define, numbers, repair
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: it drops or prints the value; level 2: a function that needs no repair stands before it."""
    rng = scene.rng
    name = rng.choice(INTEGERS)
    function = scene.identifier()
    source = arithmetic(rng, name).source
    if rng.random() < 0.5:
        body, old, new = f"print({source})", " print", " return "
    else:
        body, old, new = source, f": {name}", f": return {name}"
    lines = [f"def {function}({name}): {body}"]
    sound = [scene.identifier() for _ in range(level - 1)]
    lines[:0] = [define(other, name, arithmetic(rng, name).source) for other in sound]
    path = scene.create(lines, scene.new_module())
    scene.say(
        f"The function {function} in {path} does not return its value. Fix it.",
        f"Fix {path} so that {function} returns its value.",
    )
    scene.run(f"cat {path}", scene.lines(path))
    repair(scene, path, old, new)
    for tested in (function, *sound):
        scene.test(path, tested, numbers(rng))
