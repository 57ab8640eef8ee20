"""Look, then act: a file imports from the wrong place, or a name that is not there."""

from burnish.envs.synthesis.code import INTEGERS, SIGNS, arithmetic, constant, define, numbers, repair
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: the module is wrong; level 2: the function is, and only the module says what it is called."""
    rng = scene.rng
    name = rng.choice(INTEGERS)
    helper, function, wrong = (scene.identifier() for _ in range(3))
    library = scene.create([define(helper, name, arithmetic(rng, name).source)], scene.new_module())
    module = library.removesuffix(".py")
    first, called = (
        (f"from {wrong} import {helper}", helper) if level == 1 else (f"from {module} import {wrong}", wrong)
    )
    source = f"{called}({name}) {rng.choice(tuple(SIGNS.values()))} {constant(rng)}"
    path = scene.create([first, define(function, name, source)], scene.new_module())
    if level == 1:
        scene.say(
            f"The file {path} must import {helper} from {library}. Fix it.",
            f"Fix the import in {path}. The function {helper} is in {library}.",
        )
    else:
        scene.say(
            f"The file {path} imports a wrong name from {library}. Fix it.",
            f"Fix the import in {path}. The name is wrong, so look at {library} too.",
        )
        scene.run(f"cat {library}", scene.lines(library))
    scene.run(f"cat {path}", scene.lines(path))
    repair(scene, path, f" {wrong}", f" {module if level == 1 else helper}")
    scene.test(path, function, numbers(rng))
