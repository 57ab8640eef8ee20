"""Delete some of several files and keep the others."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: one of two files; level 2: two of three."""
    paths = [scene.create([scene.compound()]) for _ in range(level + 1)]
    # the order of creation says nothing about what is deleted
    doomed = scene.rng.sample(paths, level)
    (kept,) = set(paths) - set(doomed)
    which = " and ".join(doomed)
    scene.say(
        f"Delete the file {which} but keep {kept}.",
        f"Keep the file {kept} but delete {which}.",
        f"Remove {which} and nothing else.",
    )
    scene.run(f"rm {' '.join(doomed)}")
    for path in doomed:
        scene.remove(path)
