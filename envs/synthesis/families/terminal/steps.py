"""The terminal families that need no look first: each can be one step of a longer task."""

from collections.abc import Callable

from burnish.envs.synthesis.families.terminal import (
    append_line,
    copy_file,
    delete_file,
    edge_lines,
    find_line,
    join_files,
    make_directory,
    rename_file,
    replace_word,
    sort_lines,
    write_line,
)
from burnish.envs.synthesis.scene import Scene

STEPS: tuple[Callable[[Scene, int], None], ...] = tuple(
    module.build
    for module in (
        append_line,
        copy_file,
        delete_file,
        edge_lines,
        find_line,
        join_files,
        make_directory,
        rename_file,
        replace_word,
        sort_lines,
        write_line,
    )
)
