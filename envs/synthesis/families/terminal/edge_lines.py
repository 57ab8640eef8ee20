"""Write the first or the last lines of a file to a new file."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: one line; level 2: two or three."""
    count = scene.rng.randint(2, 3) if level > 1 else 1
    source = scene.source(min_lines=count + 2, max_lines=count + 3)
    path = scene.new_path()
    edge, command = scene.rng.choice((("first", "head"), ("last", "tail")))
    what = f"{edge} line" if count == 1 else f"{edge} {count} lines"
    scene.say(
        f"Write the {what} of {source} to {path}.",
        f"Copy only the {what} of {source} to the new file {path}.",
    )
    scene.run(f"{command} -n {count} {source} > {path}")
    lines = scene.lines(source)
    scene.write(path, lines[:count] if edge == "first" else lines[-count:])
