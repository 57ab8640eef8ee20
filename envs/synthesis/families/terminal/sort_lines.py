"""Sort the lines of a file into a new file.

First words differ and none begins another, so every locale sorts the lines alike.
"""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: ascending; level 2: in reverse or without repeats."""
    variant = scene.rng.choice(("reverse", "unique")) if level > 1 else "plain"
    lines = [scene.compound() for _ in range(4)]
    ordered = sorted(lines, reverse=variant == "reverse")
    while lines == ordered:
        scene.rng.shuffle(lines)
    if variant == "unique":
        lines.append(scene.rng.choice(lines[:-1]))
    source, path = scene.create(lines), scene.new_path()
    option, how = {"plain": ("", ""), "reverse": (" -r", " in reverse"), "unique": (" -u", " without repeats")}[variant]
    scene.say(
        f"Sort the lines of {source}{how} and write them to {path}.",
        f"Write the sorted lines of {source}{how} to the new file {path}.",
    )
    scene.run(f"sort{option} {source} > {path}")
    scene.write(path, ordered)
