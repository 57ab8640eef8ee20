"""Give a function another name, also where it is called."""

from burnish.envs.synthesis.code import INTEGERS, arithmetic, define, numbers, repair
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: nobody calls it; level 2: another function calls it twice."""
    rng = scene.rng
    name = rng.choice(INTEGERS)
    old, new = scene.identifier(), scene.identifier()
    lines, everywhere = [define(old, name, arithmetic(rng, name).source)], ""
    caller = scene.identifier() if level == 2 else None
    if caller:
        lines.append(define(caller, name, f"{old}({name}) {rng.choice('+*')} {old}({name})"))
        everywhere = " everywhere"
    path = scene.create(lines, scene.new_module())
    scene.say(
        f"Rename the function {old} to {new}{everywhere} in {path}.",
        f"The function {old} in {path} must be called {new}{everywhere}.",
    )
    repair(scene, path, f" {old}", f" {new}", flag="g" if caller else "")
    scene.retire(path, old)
    for function in filter(None, (new, caller)):
        scene.test(path, function, numbers(rng))
