"""Add a line to the end of a file, keeping what it holds."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: one line, one file; level 2: the same line to two files."""
    line = scene.compound()
    paths = [scene.source(min_lines=1, max_lines=3) for _ in range(level)]
    where = " and of ".join(paths)
    scene.say(
        f"Add the line {line} to the end of {where}.",
        f"Append the line {line} to the end of {where}.",
        f"The last line of {where} must be a new line {line}.",
    )
    for path in paths:
        scene.run(f"echo {line} >> {path}")
        scene.write(path, (*scene.lines(path), line))
