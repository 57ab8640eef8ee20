"""A scene: the working directory of one task while a family builds it, and the three voices that speak about it.

A family calls `create` for what lies there at the start, `say` for the instruction, `run` for the oracle's commands,
and `write`, `move`, `remove` for what they do to the state; of code it says with `test` and `retire` what the hidden
tests look at instead of its text. The scene does not know what a shell does: that the commands really lead to the
state is what the oracle gate proves in a sandbox.
"""

import random
from collections.abc import Iterable
from typing import Any

from burnish.envs.synthesis.spec import FunctionTest, OracleTurn, TaskSpec
from burnish.envs.synthesis.template.candidate import call_all
from burnish.envs.synthesis.words import NameSource

Lines = tuple[str, ...]


def _encode(lines: Lines) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


class Scene:
    """The task under construction. Paths are relative to the working directory; contents are tuples of lines."""

    def __init__(self, rng: random.Random, names: NameSource) -> None:
        self.rng = rng
        self._names = names
        self._initial: dict[str, Lines] = {}
        self._state: dict[str, Lines] = {}
        self._sentences: list[str] = []
        self._turns: list[OracleTurn] = []
        self._answers: list[str] = []
        self._reusable: list[str] = []
        self._gone: list[str] = []
        self._tests: list[tuple[str, str, list[list[Any]]]] = []
        self._retired: list[tuple[str, str]] = []

    # names

    def compound(self) -> str:
        return self._names.draw()

    def new_path(self) -> str:
        """A file name that nothing in the task has yet."""
        return f"{self._names.draw()}.txt"

    def identifier(self) -> str:
        """A name for a function or a module that nothing in the task has yet."""
        return self._names.draw("_")

    def new_module(self) -> str:
        """The file name of a Python module."""
        return f"{self.identifier()}.py"

    # initial state

    def create(self, lines: Iterable[str], path: str | None = None) -> str:
        """Put a file into the initial state, under a new name unless `path` is given; returns its path."""
        path = path or self.new_path()
        self._initial[path] = self._state[path] = tuple(lines)
        return path

    def source(self, min_lines: int = 3, max_lines: int = 4) -> str:
        """A file to work on: one that an earlier step wrote, if one is long enough, or else a new one."""
        for path in self._reusable:
            if len(self._state.get(path, ())) >= min_lines:
                self._reusable.remove(path)
                return path
        return self.create(self.compound() for _ in range(self.rng.randint(min_lines, max_lines)))

    def lines(self, path: str) -> Lines:
        return self._state[path]

    # what is asked, what the oracle does, what becomes of the state

    def say(self, *phrasings: str) -> None:
        """Add one sentence to the instruction: one of several that mean the same."""
        self._sentences.append(self.rng.choice(phrasings))

    def hide_in_note(self) -> str:
        """Move everything said so far into a note, an initial file; returns its path."""
        path = self.create(self._sentences)
        self._sentences.clear()
        return path

    def run(self, command: str, output: Lines = ()) -> None:
        self._turns.append(OracleTurn(command=command, output=_encode(output).decode()))

    def run_first(self, command: str, output: Lines) -> None:
        self._turns.insert(0, OracleTurn(command=command, output=_encode(output).decode()))

    def write(self, path: str, lines: Iterable[str]) -> None:
        """The oracle leaves `lines` in the file. A new name, and a line that no file held before, are answers."""
        new = tuple(lines)
        given = {line for content in (*self._initial.values(), *self._state.values()) for line in content}
        self._answers += [line for line in new if line not in given]
        if path not in self._state:
            self._answers.append(path)
            if "/" not in path:
                self._reusable.append(path)
        self._state[path] = new

    def move(self, path: str, to: str) -> None:
        self.write(to, self._state[path])
        self.remove(path)

    def remove(self, path: str) -> None:
        del self._state[path]
        self._gone.append(path)

    def test(self, path: str, function: str, arguments: Iterable[list[Any]]) -> None:
        """The hidden tests call a function of a module: it must return what it does after the oracle's commands."""
        self._tests.append((path, function, list(arguments)))

    def retire(self, path: str, function: str) -> None:
        """Nothing of this name may be left in the module."""
        self._retired.append((path, function))

    def spec(self, *, domain: str, family: str, difficulty: int, split: str) -> TaskSpec:
        """The finished task."""
        new = [path for path in self._state if path not in self._initial]
        first = (new or list(self._initial))[0].split("/")[0]
        return TaskSpec(
            domain=domain,
            family=family,
            difficulty=difficulty,
            split=split,
            name=first.removesuffix(".txt").removesuffix(".py").replace("_", "-"),
            instruction="\n".join(self._sentences),
            files={path: _encode(lines) for path, lines in sorted(self._initial.items())},
            turns=tuple(self._turns),
            expected={path: _encode(lines) for path, lines in sorted(self._state.items())},
            absent=tuple(sorted(path for path in self._gone if path not in self._state)),
            answers=tuple(dict.fromkeys(self._answers)),
            functions=tuple(self._function_test(*test) for test in self._tests),
            retired=tuple(self._retired),
        )

    def _function_test(self, path: str, function: str, arguments: list[list[Any]]) -> FunctionTest:
        sources = {
            name.removesuffix(".py"): _encode(lines).decode()
            for name, lines in self._state.items()
            if name.endswith(".py")
        }
        found = call_all(sources, [[path.removesuffix(".py"), function, list(case)] for case in arguments])
        assert all(kind == "value" for kind, _ in found), (function, sources, found)
        values = [value for _, value in found]
        return FunctionTest(path=path, name=function, cases=tuple(zip(arguments, values, strict=True)))
