"""Look, then act: a function uses a name that nothing has."""

from burnish.envs.synthesis.code import INTEGERS, SIGNS, arithmetic, constant, define, numbers, repair
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: instead of its argument; level 2: instead of another function of the file."""
    rng = scene.rng
    name, wrong = rng.sample(INTEGERS, 2)
    sign, number = rng.choice(tuple(SIGNS.values())), constant(rng)
    function = scene.identifier()
    if level == 1:
        path = scene.create([define(function, name, f"{wrong} {sign} {number}")], scene.new_module())
        scene.say(
            f"The function {function} in {path} uses a wrong name for its argument. Fix it.",
            f"Fix the wrong name in the function {function} of {path}.",
        )
        old, new = wrong, name
    else:
        helper, missing = scene.identifier(), scene.identifier()
        lines = [define(helper, name, arithmetic(rng, name).source)]
        lines.append(define(function, name, f"{missing}({name}) {sign} {number}"))
        path = scene.create(lines, scene.new_module())
        scene.say(
            f"The function {function} in {path} must call {helper}. Fix it.",
            f"Fix {path}. The function {function} must call {helper} in it.",
        )
        scene.test(path, helper, numbers(rng))
        old, new = missing, helper
    scene.run(f"cat {path}", scene.lines(path))
    repair(scene, path, f" {old}", f" {new}")
    scene.test(path, function, numbers(rng))
