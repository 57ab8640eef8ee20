"""The processes of a local sandbox: found by the mark in their environment, ended all together.

Whatever a command started carries the mark, also what left its session.
"""

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

MARK = "BURNISH_SANDBOX"
KILL_ROUNDS = 50
PROC = Path("/proc")


def processes_of(sandbox_id: str) -> dict[int, int]:
    """Process -> parent of everything that carries the sandbox's mark."""
    mark = f"{MARK}={sandbox_id}".encode()
    found: dict[int, int] = {}
    for entry in PROC.glob("[0-9]*"):
        try:
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            found[int(entry.name)] = int(fields[1])
    return found


def end_processes(sandbox_id: str, shell: int = 0, spared: frozenset[int] = frozenset()) -> None:
    """Stops all, so that no parent goes on when its child dies, then kills all; except `spared` and what is below them."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        seen: set[int] = set()
        for _ in range(KILL_ROUNDS):
            found = processes_of(sandbox_id)
            fresh = {pid for pid in found if pid not in seen and not is_spared(pid, found, shell, spared)}
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            seen |= fresh
            if not fresh:
                break
        if not seen:
            return


def is_spared(pid: int, parents: Mapping[int, int], shell: int, spared: frozenset[int]) -> bool:
    while pid in parents and pid != shell:
        if pid in spared:
            return True
        pid = parents[pid]
    return False


def directory_of(pid: int) -> str:
    """Where a process works. Raises OSError when it is gone."""
    return str((PROC / str(pid) / "cwd").readlink())
