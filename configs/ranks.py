"""Several ranks of one verb on this machine: its command line once a rank, and one exit code for all.

What torchrun does for a script, without its restarts, and with the exit code of the rank that failed: a user's mistake
inside a rank is still a user's mistake. On several machines start the ranks with torchrun; RANK is then set, and nothing
is launched here.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

POLL_S = 0.05
# a rank that was told to end and has not is killed
END_DEADLINE_S = 30.0
PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """This process is one of several already."""
    return "RANK" in os.environ


def launch(num_ranks: int, args: Sequence[str]) -> int:
    """Runs `burnish ARGS` once a rank and waits; returns 0, or the exit code of the first rank that failed.

    When one rank fails the others are ended; when this process dies they die with it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []

    def end(*_: object) -> None:
        for process in processes:
            process.terminate()

    before = signal.signal(signal.SIGTERM, end)
    try:
        for rank in range(num_ranks):
            processes.append(_start(rank, num_ranks, port, args))
        return _wait(processes)
    finally:
        end()
        deadline = time.monotonic() + END_DEADLINE_S
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        signal.signal(signal.SIGTERM, before)


def _start(rank: int, num_ranks: int, port: int, args: Sequence[str]) -> "subprocess.Popen[bytes]":
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # a rank has its share of the cores; more threads than cores is slower than one each
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks))}
    env = threads | os.environ | {name: str(value) for name, value in place.items()} | address
    command = [sys.executable, "-m", "burnish.configs.cli", *args]
    # descriptors that were handed to this process (a run folder's lock) are the ranks' too
    return subprocess.Popen(command, env=env, close_fds=False, preexec_fn=_die_with_parent)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(processes: "list[subprocess.Popen[bytes]]") -> int:
    left = list(processes)
    while left:
        for process in list(left):
            code = process.poll()
            if code is None:
                continue
            left.remove(process)
            if code:
                # by a signal: as a shell says it
                return code if code > 0 else 128 - code
        time.sleep(POLL_S)
    return 0
