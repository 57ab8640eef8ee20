"""One process with a reward function in it, as its parent holds it: started, asked under a time limit, ended for good.

The program that runs in it is function_main.py.
"""

import contextlib
import json
import math
import os
import secrets
import select
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from burnish.envs.errors import UserError
from burnish.envs.sandbox.processes import MARK, end_processes
from burnish.verifiers.calls import Call
from burnish.verifiers.config import GradingConfig

# importing a library that a function needs can take long on a busy machine
START_DEADLINE_S = 120.0
EXIT_DEADLINE_S = 2.0


class ProcessFault(RuntimeError):
    """The function's process gave no answer: it ended, or the time was over."""


class FunctionProcess:
    """One process with the function loaded. Used by one thread at a time.

    Raises:
        UserError: the function cannot be loaded or called.
    """

    def __init__(self, spec: str, config: GradingConfig) -> None:
        self._mark = f"grader-{secrets.token_hex(8)}"
        self._received = b""
        self._asked = 0
        self._process = subprocess.Popen(
            # -P: a file of this folder must not shadow the standard library
            [sys.executable, "-P", "-m", "burnish.verifiers.function_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, MARK: self._mark},
            # Ctrl-C is the driver's: it closes its processes itself
            start_new_session=True,
        )
        start = {
            "spec": spec,
            "style": str(config.style),
            "options": config.options,
            # the folder that the command was given in comes last: it must not shadow a library
            "path": [*sys.path, str(Path.cwd())],
            "memory_mb": config.memory_mb,
        }
        try:
            self.hello = self._exchange(start, START_DEADLINE_S)
        except ProcessFault as error:
            self.close()
            raise UserError(f"the process for {spec} {error}") from None
        if "error" in self.hello:
            self.close()
            raise UserError(self.hello["error"])

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, call: Call, timeout_s: float) -> dict[str, Any]:
        """`rewards` or `error`, and `log`.

        Raises:
            ProcessFault: no answer; the process is of no use any more.
        """
        self._asked += 1
        request = {"id": self._asked, "timeout_s": timeout_s, "call": asdict(call)}
        answer = self._exchange(request, timeout_s, "grading.timeout_s = ")
        if answer["id"] != self._asked:
            raise ProcessFault(f"answered call {answer['id']} instead of {self._asked}")
        return answer

    def _exchange(self, message: dict[str, Any], timeout_s: float, key: str = "") -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ProcessFault(f"ended{self._how()}") from None
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(math.ceil(left_s * 1000)):
                raise ProcessFault(f"did not answer within {key}{timeout_s:g} s")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise ProcessFault(f"ended{self._how()}")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _how(self) -> str:
        try:
            code = self._process.wait(EXIT_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {-code}" if code < 0 else f" with exit code {code}"

    def close(self) -> None:
        """Ends the process and whatever it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        end_processes(self._mark)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
