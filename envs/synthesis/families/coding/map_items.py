"""Write a function that makes a new list from a list of numbers."""

from burnish.envs.synthesis.code import SIGNS, constant, define, lists
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: from every item; level 2: from those over a limit."""
    rng = scene.rng
    word, sign = rng.choice(list(SIGNS.items()))
    number = constant(rng)
    function, path = scene.identifier(), scene.new_module()
    if level == 1:
        which, condition, near = "in a", "", []
    else:
        limit = constant(rng)
        which, condition, near = f"over {limit} in a", f" if x > {limit}", [limit]
    words = f"x {word} {number} for every x {which}"
    scene.say(
        f"Write {function} of a to {path}. It returns {words}.",
        f"Make a file {path} that defines {function} of a as {words}.",
    )
    line = define(function, "a", f"[x {sign} {number} for x in a{condition}]")
    scene.run(f"echo '{line}' > {path}")
    scene.write(path, (line,))
    scene.test(path, function, lists(rng, near))
