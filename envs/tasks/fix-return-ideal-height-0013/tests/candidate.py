"""Calls an agent's functions in a child process that can neither see nor say what they must return.

The child is forked before its parent has read one expected value, and their file is gone before the child gets the agent's
code and the arguments. Then it is nobody's process where it may become that, starts no other, writes no file, and has
little memory and time. It answers with the returned values as JSON, which are compared in the parent. Whatever else the
agent's code does (exit, print, patch, wait, raise) makes an answer that is missing or wrong: no test passes, none is lost.

The synthesis computes the expected values with `call_all` too.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import resource
import select
import signal
import sys
import time
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any

NOBODY = 65534
WALL_S = 10.0
CPU_S = 2
MEMORY_BYTES = 128 << 20
"""More than the interpreter has when it is forked."""
ANSWER_MAX_BYTES = 1 << 20
DEPTH_MAX = 20
PR_SET_DUMPABLE = 4


# what both sides know


def plain(value: Any, depth: int = 0) -> Any:
    """`value` when it is built of the exact types that JSON has; an object that only claims to be equal is none of them.

    Raises:
        TypeError: it is not.
    """
    if depth > DEPTH_MAX:
        raise TypeError("nested too deeply")
    kind = type(value)
    if kind is list:
        return [plain(item, depth + 1) for item in value]
    if kind in (int, float, bool, str, type(None)):
        return value
    raise TypeError("not a plain value")


class SourceFinder:
    """Imports modules from texts; asked first, as Python looks beside a program first."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        loader: Any = self
        return importlib.util.spec_from_loader(name, loader) if name in self.sources else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.sources[module.__name__], f"{module.__name__}.py", "exec"), module.__dict__)


def call_all(sources: dict[str, str], calls: list[list[Any]]) -> list[list[Any]]:
    """Calls functions of modules that are given as text. Runs the text: only in a child, or on what we wrote ourselves.

    Args:
        sources: module name -> its text.
        calls: [module, function, arguments] each.

    Returns:
        For each call ["value", what it returned] or ["error", the name of what it raised].
    """
    finder: Any = SourceFinder(sources)
    sys.meta_path.insert(0, finder)
    try:
        return [_call(*call) for call in calls]
    finally:
        sys.meta_path.remove(finder)
        for name in sources:
            sys.modules.pop(name, None)


def _call(module: str, function: str, arguments: list[Any]) -> list[Any]:
    try:
        return ["value", plain(getattr(importlib.import_module(module), function)(*arguments))]
    except BaseException as error:  # noqa: BLE001 - whatever the agent's code raises is its answer
        return ["error", type(error).__name__]


# the child


def child_main(request: int, answer: int) -> None:
    """Gives up its rights, says so with one byte, reads the request and answers. Never returns to the caller's code."""
    confine({request, answer})
    os.write(answer, b"+")
    with os.fdopen(request, "rb") as stream:
        asked = json.loads(stream.read())
    answers = call_all(asked["sources"], asked["calls"])
    with os.fdopen(answer, "wb") as stream:
        stream.write(json.dumps(answers).encode())


def confine(kept: set[int]) -> None:
    """Raises:
    OSError: a right cannot be given up; then nothing of the agent's runs.
    """
    os.setsid()
    os.chdir("/")
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # the listing's own is closed already
                os.close(descriptor)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: CPU_S,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 32,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    # counts for no user but root; above it would stop setuid
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


# the parent


class Child:
    """The forked process, and the two pipes to it."""

    def __init__(self) -> None:
        """Raises:
        RuntimeError: it could not be confined; the tests then give no verdict.
        """
        if os.getuid() != 0:
            hide_memory()
        request, self.request = os.pipe()
        self.answer, answer = os.pipe()
        self.deadline = time.monotonic() + WALL_S
        self.pid = os.fork()
        if self.pid == 0:
            try:
                child_main(request, answer)
            finally:
                os._exit(0)
        os.close(request)
        os.close(answer)
        if self.read(1) != b"+":
            self.end()
            raise RuntimeError("the process for the agent's code cannot be confined")

    def read(self, size: int) -> bytes:
        """Up to `size` bytes: fewer at the end of the stream or at the deadline."""
        found = b""
        poll = select.poll()
        poll.register(self.answer, select.POLLIN)
        while len(found) < size and poll.poll(max(0, int((self.deadline - time.monotonic()) * 1000))):
            chunk = os.read(self.answer, min(size - len(found), 1 << 16))
            if not chunk:
                break
            found += chunk
        return found

    def ask(self, sources: dict[str, str], calls: list[list[Any]]) -> list[Any]:
        """The answers to `calls`; none when what came back has not their form."""
        with os.fdopen(self.request, "wb") as stream:
            stream.write(json.dumps({"sources": sources, "calls": calls}).encode())
        text = self.read(ANSWER_MAX_BYTES)
        self.end()
        try:
            answers = json.loads(text)
        except (ValueError, RecursionError):
            return []
        return answers if isinstance(answers, list) and len(answers) == len(calls) else []

    def end(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):  # gone, or before its setsid
                kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.answer)


def hide_memory() -> None:
    """For a child of the same user: this process's memory and open files can be read by nobody but root."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def results(sources: dict[str, str], tests: Path) -> dict[str, bool]:
    """Test name -> whether it passed.

    Args:
        sources: module name -> text, of the agent's files.
        tests: JSON with `functions` (module, name, cases of arguments and what they return) and `retired` (module, name).
            It is deleted.
    """
    child = Child()
    wanted = json.loads(tests.read_text())
    tests.unlink()
    calls = [[test["module"], test["name"], case["arguments"]] for test, case in _cases(wanted)]
    return compare(wanted, sources, child.ask(sources, calls))


def compare(wanted: dict[str, Any], sources: dict[str, str], answers: list[Any]) -> dict[str, bool]:
    """Test name -> whether it passed; without answers none of the functions does. Writes what went wrong first."""
    found: dict[str, bool] = {}
    for (test, case), answer in zip(_cases(wanted), answers or repeat(None), strict=False):
        # as text, so that 1, 1.0 and true differ
        is_right = json.dumps(answer) == json.dumps(["value", case["returns"]])
        name = f"{test['name']} of {test['module']}.py returns what it must"
        if not is_right and found.get(name, True):
            sys.stdout.write(f"{test['name']}{tuple(case['arguments'])} gave {json.dumps(answer)[:200]}\n")
        found[name] = found.get(name, True) and is_right
    for old in wanted["retired"]:
        text = sources.get(old["module"], "")
        name = f"{old['name']} is gone from {old['module']}.py"
        found[name] = bool(text) and not re.search(rf"\b{re.escape(old['name'])}\b", text)
    return found


def _cases(wanted: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(test, case) for test in wanted["functions"] for case in test["cases"]]
