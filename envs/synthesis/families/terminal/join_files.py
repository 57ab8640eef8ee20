"""Join files, in the order asked for, into a new file."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: two files; level 2: three."""
    sources = [scene.source(min_lines=1, max_lines=2) for _ in range(level + 1)]
    path = scene.new_path()
    scene.say(
        f"Join the files {' and '.join(sources)} in this order into {path}.",
        f"Make a new file {path} from {' then '.join(sources)}.",
    )
    scene.run(f"cat {' '.join(sources)} > {path}")
    scene.write(path, [line for source in sources for line in scene.lines(source)])
