"""Look, then act: find the code of a name in a list, then write it to a new file."""

from burnish.envs.synthesis.scene import Scene


def _listing(scene: Scene, entries: list[tuple[str, str]]) -> list[str]:
    lines = [f"The code of {key} is {value}" for key, value in entries]
    scene.rng.shuffle(lines)
    return lines


def build(scene: Scene, level: int) -> None:
    """Level 1: the list has the code; level 2: the list says which other file has it."""
    key, code = scene.compound(), scene.compound()
    decoys = [(scene.compound(), scene.compound()) for _ in range(2)]
    if level == 1:
        listing = scene.create(_listing(scene, [(key, code), *decoys]))
    else:
        where = scene.create(_listing(scene, [(key, code), *decoys]))
        listing = scene.create(_listing(scene, [(key, f"in {where}")]))
    path = scene.new_path()
    scene.say(
        f"Find the code of {key} in {listing} and write it to {path}.",
        f"The file {listing} has the code of {key} in it. Write the code to {path}.",
    )
    source = listing
    if level > 1:
        scene.run(f"grep {key} {listing}", scene.lines(listing))
        source = where
    scene.run(f"grep {key} {source}", tuple(line for line in scene.lines(source) if key in line))
    scene.run(f"echo {code} > {path}")
    scene.write(path, (code,))
