"""Copy a file to a new name or into a directory."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: to a new name; level 2: into a directory that is there."""
    source = scene.source(min_lines=1)
    if level == 1:
        target = path = scene.new_path()
        scene.say(f"Copy the file {source} to {target}.", f"Make a copy of {source} with the name {target}.")
    else:
        target = scene.compound()
        path = f"{target}/{source}"
        scene.create([scene.compound()], f"{target}/{scene.new_path()}")
        scene.say(
            f"Copy the file {source} into the directory {target}.",
            f"The directory {target} must hold a copy of {source} too.",
        )
    scene.run(f"cp {source} {target}")
    scene.write(path, scene.lines(source))
