"""Look, then act: a note says which file to write."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: the note names the file; level 2: the note also says what the line is."""
    path = scene.new_path()
    if level == 1:
        line = scene.compound()
        note = scene.create([f"The file is {path}."])
        scene.say(
            f"The note {note} names a file. Write the line {line} to it.",
            f"Read {note} and write the line {line} to the file it names.",
        )
    else:
        line = scene.compound()
        note = scene.create([f"The file is {path}.", f"The line is {line}."])
        scene.say(
            f"The note {note} names a file and a line. Write the line to the file.",
            f"Read {note} and write the line it gives to the file it names.",
        )
    scene.run(f"cat {note}", scene.lines(note))
    scene.run(f"echo {line} > {path}")
    scene.write(path, (line,))
