"""Add a function to a file that has one, keeping that one."""

from burnish.envs.synthesis.code import INTEGERS, SIGNS, arithmetic, constant, define, numbers, symbols
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: on its own; level 2: it calls the function that is there."""
    rng = scene.rng
    name = rng.choice(INTEGERS)
    old, new = scene.identifier(), scene.identifier()
    path = scene.create([define(old, name, arithmetic(rng, name).source)], scene.new_module())
    if level == 1:
        piece = arithmetic(rng, name)
        words, source = piece.words, piece.source
    else:
        end = f"{rng.choice(tuple(SIGNS))} {constant(rng)}"
        words, source = f"{old} of {name} {end}", f"{old}({name}) {symbols(end)}"
    scene.say(
        f"Add the function {new} of {name} to {path}. It returns {words}.",
        f"The file {path} must also define {new} of {name} as {words}.",
    )
    line = define(new, name, source)
    scene.run(f"echo '{line}' >> {path}")
    scene.write(path, (*scene.lines(path), line))
    for function in (old, new):
        scene.test(path, function, numbers(rng))
