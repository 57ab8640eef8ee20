"""The sample tasks under envs/tasks: a few of what the families make, kept in the repository to read and to try.

`python -m burnish.envs.synthesis.samples` writes them again after a family has changed; a test says when that is due.
"""

import random
from pathlib import Path

from burnish.envs.synthesis.generate import generate
from burnish.envs.synthesis.write import task_id, write_task

SAMPLES = (
    ("write-line", 1),
    ("sort-lines", 1),
    ("replace-word", 1),
    ("make-directory", 2),
    ("count-lines", 2),
    ("look-up", 2),
    ("follow-note", 2),
    ("rename-file", 3),
    ("write-function", 1),
    ("list-function", 2),
    ("fix-operator", 1),
    ("fix-import", 1),
    ("follow-request", 2),
    ("fix-return", 3),
)
DIRECTORY = Path(__file__).parents[1] / "tasks"


def write_samples(parent: Path) -> list[Path]:
    """Write every sample below `parent`."""
    folders = []
    for index, (family, difficulty) in enumerate(SAMPLES):
        spec = generate(family, difficulty, random.Random(f"sample {index}"))
        folders.append(write_task(spec, task_id(spec, index), parent))
    return folders


if __name__ == "__main__":
    write_samples(DIRECTORY)
