"""Write a function whose value depends on a condition."""

from burnish.envs.synthesis.code import COMPARISONS, INTEGERS, constant, define, numbers, symbols
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: one of two constants; level 2: the number plus one or minus the other."""
    rng = scene.rng
    name = rng.choice(INTEGERS)
    how, sign = rng.choice(list(COMPARISONS.items()))
    limit = constant(rng)
    yes = constant(rng)
    no = constant(rng, (yes,))
    then, otherwise = (str(yes), str(no)) if level == 1 else (f"{name} plus {yes}", f"{name} minus {no}")
    function, path = scene.identifier(), scene.new_module()
    words = f"{then} if {name} {how} {limit} else {otherwise}"
    scene.say(
        f"Write {function} of {name} to {path}. It returns {words}.",
        f"Make a file {path} that defines {function} of {name} as {words}.",
    )
    line = define(function, name, f"{symbols(then)} if {name} {sign} {limit} else {symbols(otherwise)}")
    scene.run(f"echo '{line}' > {path}")
    scene.write(path, (line,))
    scene.test(path, function, numbers(rng, near=(limit,)))
