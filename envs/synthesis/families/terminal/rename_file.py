"""Rename a file, or move it into a directory."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: to a new name; level 2: into a directory that is there."""
    source = scene.source(min_lines=1)
    if level == 1:
        target = path = scene.new_path()
        scene.say(f"Rename the file {source} to {target}.", f"Give the file {source} the new name {target}.")
    else:
        target = scene.compound()
        path = f"{target}/{source}"
        scene.create([scene.compound()], f"{target}/{scene.new_path()}")
        scene.say(
            f"Move the file {source} into the directory {target}.",
            f"The file {source} belongs in the directory {target} so move it.",
        )
    scene.run(f"mv {source} {target}")
    scene.move(source, path)
