"""Find the lines of a file that hold a word, or that do not, and write them to a new file."""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: the line with the word; level 2: the lines without it."""
    word = scene.compound()
    lines = [f"{scene.compound()} {scene.compound()}" for _ in range(3)]
    place = scene.rng.randrange(len(lines))
    lines[place] = f"{lines[place].split()[0]} {word}"
    source = scene.create(lines)
    path = scene.new_path()
    if level == 1:
        scene.say(
            f"Find the line with {word} in {source} and write it to {path}.",
            f"Write the line of {source} that has {word} in it to {path}.",
        )
        scene.run(f"grep {word} {source} > {path}")
        scene.write(path, [lines[place]])
    else:
        scene.say(
            f"Find the lines without {word} in {source} and write them to {path}.",
            f"Write every line of {source} that has no {word} in it to {path}.",
        )
        scene.run(f"grep -v {word} {source} > {path}")
        scene.write(path, [line for line in lines if word not in line])
