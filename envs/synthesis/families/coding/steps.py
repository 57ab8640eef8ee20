"""The coding families that need no look first and ask for little: each can be one step of a longer task."""

from collections.abc import Callable

from burnish.envs.synthesis.families.coding import (
    add_function,
    list_function,
    rename_function,
    text_function,
    two_arguments,
    write_function,
)
from burnish.envs.synthesis.scene import Scene

STEPS: tuple[Callable[[Scene, int], None], ...] = (
    add_function.build,
    list_function.build,
    rename_function.build,
    text_function.build,
    two_arguments.build,
    write_function.build,
)
