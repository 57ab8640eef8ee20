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
    holder = scene.create(_listing(scene, [(key, code), *decoys]))
    # where the search begins: at the list itself, or at a file that says where the list is
    start = holder if level == 1 else scene.create(_listing(scene, [(key, f"in {holder}")]))
    path = scene.new_path()
    scene.say(
        f"Find the code of {key} in {start} and write it to {path}.",
        f"The file {start} has the code of {key} in it. Write the code to {path}.",
    )
    for source in dict.fromkeys((start, holder)):
        scene.run(f"grep {key} {source}", tuple(line for line in scene.lines(source) if key in line))
    scene.run(f"echo {code} > {path}")
    scene.write(path, (code,))
