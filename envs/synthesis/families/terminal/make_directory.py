"""Make a directory, or a nested one, and copy a file into it (an empty directory would leave no artifact)."""

from burnish.envs.synthesis.scene import Scene

# each is one token after a slash
INNER = ("data", "image", "home", "library", "item", "service")


def build(scene: Scene, level: int) -> None:
    """Level 1: one directory; level 2: one inside another."""
    source = scene.source(min_lines=1, max_lines=2)
    directory = scene.compound() + (f"/{scene.rng.choice(INNER)}" if level > 1 else "")
    scene.say(
        f"Make the directory {directory} and copy {source} into it.",
        f"Copy {source} into a new directory {directory}.",
    )
    scene.run(f"mkdir -p {directory}")
    scene.run(f"cp {source} {directory}")
    scene.write(f"{directory}/{source}", scene.lines(source))
