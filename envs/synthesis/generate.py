"""From (family, difficulty, split, seed) to a task: a pure function, so that any task can be made again from its record.

Difficulty 1 is the plain form of a family, 2 its harder form, 3 two steps in one task.
"""

import random
from collections.abc import Callable

from burnish.envs.synthesis.families import (
    append_line,
    copy_file,
    count_lines,
    delete_file,
    edge_lines,
    find_line,
    follow_note,
    join_files,
    look_up,
    make_directory,
    named_file,
    rename_file,
    replace_word,
    sort_lines,
    write_line,
)
from burnish.envs.synthesis.families.steps import STEPS
from burnish.envs.synthesis.scene import Scene
from burnish.envs.synthesis.spec import TaskSpec
from burnish.envs.synthesis.words import FIRST_WORDS, SECOND_WORDS, NameSource

# a family: a function that builds its part of a scene at level 1 or 2
FAMILIES: dict[str, Callable[[Scene, int], None]] = {
    "append-line": append_line.build,
    "copy-file": copy_file.build,
    "count-lines": count_lines.build,
    "delete-file": delete_file.build,
    "edge-lines": edge_lines.build,
    "find-line": find_line.build,
    "follow-note": follow_note.build,
    "join-files": join_files.build,
    "look-up": look_up.build,
    "make-directory": make_directory.build,
    "named-file": named_file.build,
    "rename-file": rename_file.build,
    "replace-word": replace_word.build,
    "sort-lines": sort_lines.build,
    "write-line": write_line.build,
}
DIFFICULTIES = (1, 2, 3)
GENERATOR_VERSION = 1
NUM_WORDS = len(FIRST_WORDS) + len(SECOND_WORDS)


def generate(
    family: str, difficulty: int, rng: random.Random, *, split: str = "train", num_words: int = NUM_WORDS
) -> TaskSpec:
    """One task of a family.

    Args:
        family: a key of FAMILIES.
        difficulty: 1, 2 or 3.
        rng: the only source of chance.
        split: `train` or `heldout`; decides which compound names may occur.
        num_words: size of the vocabulary that names are made of.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; there are {', '.join(FAMILIES)}")
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be one of {DIFFICULTIES}, got {difficulty}")
    scene = Scene(rng, NameSource(rng, split, num_words))
    FAMILIES[family](scene, 2 if difficulty == 2 else 1)
    if difficulty == 3:
        rng.choice(STEPS)(scene, 1)
    return scene.spec(family=family, difficulty=difficulty, split=split)
