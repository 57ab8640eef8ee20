"""Count lines, then write the count after a name: the number has to be looked at first."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: all lines; level 2: those that hold a word."""
    label = scene.compound()
    if level == 1:
        source = scene.source(min_lines=2, max_lines=7)
        count = len(scene.lines(source))
        path = scene.new_path()
        scene.say(
            f"Count the lines of {source} and write {label} and the count to {path}.",
            f"Write the line {label} and how many lines {source} has to {path}.",
        )
        scene.run(f"wc -l {source}", (f"{count} {source}",))
    else:
        word = scene.compound()
        count = scene.rng.randint(2, 5)
        lines = [f"{scene.compound()} {word}" for _ in range(count)] + [scene.compound() for _ in range(2)]
        scene.rng.shuffle(lines)
        source = scene.create(lines)
        path = scene.new_path()
        scene.say(
            f"Count the lines with {word} in {source} and write {label} and the count to {path}.",
            f"Write the line {label} and how many lines of {source} have {word} in them to {path}.",
        )
        scene.run(f"grep -c {word} {source}", (str(count),))
    scene.run(f"echo {label} {count} > {path}")
    scene.write(path, (f"{label} {count}",))
