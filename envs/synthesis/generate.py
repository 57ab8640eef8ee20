"""From (family, difficulty, split, seed) to a task: a pure function, so that any task can be made again from its record.

Difficulty 1 is the plain form of a family, 2 its harder form, 3 two steps in one task.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from burnish.envs.config import Domain
from burnish.envs.synthesis.families.coding import (
    add_function,
    choose_value,
    fix_call,
    fix_constant,
    fix_import,
    fix_name,
    fix_operator,
    fix_return,
    follow_request,
    list_function,
    map_items,
    rename_function,
    text_function,
    two_arguments,
    write_function,
)
from burnish.envs.synthesis.families.coding.steps import STEPS as CODING_STEPS
from burnish.envs.synthesis.families.terminal import (
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
from burnish.envs.synthesis.families.terminal.steps import STEPS as TERMINAL_STEPS
from burnish.envs.synthesis.scene import Scene
from burnish.envs.synthesis.spec import TaskSpec
from burnish.envs.synthesis.words import FIRST_WORDS, SECOND_WORDS, NameSource

Build = Callable[[Scene, int], None]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of task."""

    domain: Domain
    build: Build
    """Builds its part of a scene at level 1 or 2."""


_TERMINAL: dict[str, Build] = {
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
_CODING: dict[str, Build] = {
    "add-function": add_function.build,
    "choose-value": choose_value.build,
    "fix-call": fix_call.build,
    "fix-constant": fix_constant.build,
    "fix-import": fix_import.build,
    "fix-name": fix_name.build,
    "fix-operator": fix_operator.build,
    "fix-return": fix_return.build,
    "follow-request": follow_request.build,
    "list-function": list_function.build,
    "map-items": map_items.build,
    "rename-function": rename_function.build,
    "text-function": text_function.build,
    "two-arguments": two_arguments.build,
    "write-function": write_function.build,
}
# by name; no two domains have a family of one name
FAMILIES: dict[str, Family] = {
    name: Family(domain=domain, build=build)
    for domain, builds in ((Domain.terminal, _TERMINAL), (Domain.coding, _CODING))
    for name, build in builds.items()
}
STEPS = {Domain.terminal: TERMINAL_STEPS, Domain.coding: CODING_STEPS}
DIFFICULTIES = (1, 2, 3)
GENERATOR_VERSION = 2
NUM_WORDS = len(FIRST_WORDS) + len(SECOND_WORDS)


def families_of(domain: Domain) -> list[str]:
    """Names of the domain's families, in order."""
    return [name for name, family in FAMILIES.items() if family.domain == domain]


def generate(
    family: str, difficulty: int, rng: random.Random, *, split: str = "train", num_words: int = NUM_WORDS
) -> TaskSpec:
    """One task of a family.

    Args:
        family: a key of FAMILIES.
        difficulty: 1, 2 or 3.
        rng: the only source of chance.
        split: `train`, `heldout` or `demonstration`; decides which compound names may occur.
        num_words: size of the vocabulary that names are made of.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; there are {', '.join(FAMILIES)}")
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be one of {DIFFICULTIES}, got {difficulty}")
    domain = FAMILIES[family].domain
    scene = Scene(rng, NameSource(rng, split, num_words))
    FAMILIES[family].build(scene, 2 if difficulty == 2 else 1)
    if difficulty == 3:
        rng.choice(STEPS[domain])(scene, 1)
    return scene.spec(domain=str(domain), family=family, difficulty=difficulty, split=split)
