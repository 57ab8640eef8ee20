"""Look, then act: a function calls the wrong method, or the wrong function of the language."""

from burnish.envs.synthesis.code import TEXT_METHODS, define, lists, repair, texts
from burnish.envs.synthesis.scene import Scene

# functions of a list, each with its words
CALLS = {
    "the largest item of a": "max",
    "the smallest item of a": "min",
    "the sum of a": "sum",
    "the length of a": "len",
}


def build(scene: Scene, level: int) -> None:
    """Level 1: a method of a text; level 2: a function of a list."""
    rng = scene.rng
    table = {f"s {words}": method for words, method in TEXT_METHODS.items()} if level == 1 else CALLS
    (words, right), (_, wrong) = rng.sample(list(table.items()), 2)
    function = scene.identifier()
    if level == 1:
        lines, old, new, arguments = [define(function, "s", f"s.{wrong}()")], f"s.{wrong}", f"s.{right}", texts(rng)
    else:
        lines, old, new, arguments = [define(function, "a", f"{wrong}(a)")], f" {wrong}", f" {right}", lists(rng)
    path = scene.create(lines, scene.new_module())
    scene.say(
        f"The function {function} in {path} must return {words}. Fix it.",
        f"Fix the call in {function} of {path}. It must return {words}.",
    )
    scene.run(f"cat {path}", scene.lines(path))
    repair(scene, path, old, new)
    scene.test(path, function, arguments)
