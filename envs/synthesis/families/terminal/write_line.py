"""Write one line to a new file."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: a line of one name; level 2: of two names."""
    line = " ".join(scene.compound() for _ in range(level))
    path = scene.new_path()
    scene.say(
        f"Write the line {line} to the new file {path}.",
        f"Make a new file {path} with the line {line} in it.",
        f"Put the line {line} into a new file {path}.",
    )
    scene.run(f"echo {line} > {path}")
    scene.write(path, (line,))
