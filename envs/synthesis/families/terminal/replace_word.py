"""Replace a word inside a file, in place.

The word never begins a line, so the oracle can match it with the space before it.
"""

from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """Level 1: it stands there once; level 2: twice in a line and again below."""
    old, new = scene.compound(), scene.compound()
    other = [scene.compound() for _ in range(3)]
    if level == 1:
        lines, flag, everywhere = [f"{other[0]} {old}", f"{other[1]} {other[2]}"], "", ""
    else:
        lines, flag, everywhere = [f"{other[0]} {old} {old}", other[1], f"{other[2]} {old}"], "g", " everywhere"
    source = scene.create(lines)
    scene.say(
        f"Replace the word {old} with {new}{everywhere} in the file {source}.",
        f"Change {old} to {new}{everywhere} in {source}.",
    )
    scene.run(f"sed -i 's/ {old}/ {new}/{flag}' {source}")
    scene.write(source, [line.replace(old, new) for line in lines])
