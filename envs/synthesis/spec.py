"""What a generator hands to the rest of the synthesis: a task as plain values, before any folder or container exists."""

from dataclasses import dataclass
from typing import Any

from burnish.envs.synthesis.words import COMPOUND


@dataclass(frozen=True, kw_only=True)
class OracleTurn:
    """One turn of the oracle solution."""

    command: str
    """One line of shell, as the policy would write it."""
    output: str
    """What a terminal shows for it; the oracle gate compares the real output with this."""


@dataclass(frozen=True, kw_only=True)
class FunctionTest:
    """A Python function that the hidden tests call."""

    path: str
    name: str
    cases: tuple[tuple[list[Any], Any], ...]
    """Arguments, and what it returns for them."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task: what is asked, what lies in the working directory, what must lie there afterwards, and one way there."""

    domain: str
    family: str
    difficulty: int
    split: str
    name: str
    """The compound that ends up in the task's id."""
    instruction: str
    files: dict[str, bytes]
    """Initial files, by path relative to the working directory."""
    turns: tuple[OracleTurn, ...]
    expected: dict[str, bytes]
    """What every file holds after the oracle's commands, untouched files included."""
    absent: tuple[str, ...]
    """Paths at which no regular file may be left."""
    answers: tuple[str, ...]
    """What a solver has to produce: lines and names that no initial file holds."""
    functions: tuple[FunctionTest, ...] = ()
    """Called by the hidden tests."""
    retired: tuple[tuple[str, str], ...] = ()
    """(path, name) of functions of which nothing may be left in a file."""

    @property
    def fixed_files(self) -> dict[str, bytes]:
        """Files that must hold exactly this at the end, but for a missing final newline; of code only the untouched."""
        code = {test.path for test in self.functions} | {path for path, _ in self.retired}
        return {path: content for path, content in self.expected.items() if path not in code}

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path the hidden tests look at."""
        return tuple(sorted({*self.files, *self.expected, *self.absent}))

    @property
    def compounds(self) -> frozenset[str]:
        """Every compound name in the task's text: all of them belong to its split."""
        text = [self.instruction, *(turn.command for turn in self.turns), *self.paths]
        contents = [content.decode() for content in (*self.files.values(), *self.expected.values())]
        return frozenset(COMPOUND.findall("\n".join(text + contents)))
