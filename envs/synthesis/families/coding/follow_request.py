"""Look, then act: a note holds the instruction of another family."""

from burnish.envs.synthesis.families.coding.steps import STEPS
from burnish.envs.synthesis.scene import Scene


def build(scene: Scene, level: int) -> None:
    """The note asks for one step of the given level."""
    scene.rng.choice(STEPS)(scene, level)
    note = scene.hide_in_note()
    scene.say(f"Read {note} and write the code that it asks for.", f"The note {note} asks for code. Write it.")
    scene.run_first(f"cat {note}", scene.lines(note))
