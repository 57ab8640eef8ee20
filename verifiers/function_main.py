"""The process that a reward function runs in: `python -m burnish.verifiers.function_main`. Reads calls, writes rewards.

One JSON object a line, in on stdin and out on what was stdout; what the function prints is kept as its log. The function
runs in the main thread, so that libraries which set alarms work. The parent keeps the time; when it is gone, this process
goes too: its input ends, or the kernel ends it for the CPU seconds that no call may take.
"""

import contextlib
import importlib
import io
import json
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

from burnish.envs.sandbox.capture import Capture
from burnish.verifiers.calls import Call, CallError, Form, form_of
from burnish.verifiers.config import Style

LOG_CAP_BYTES = 20_000
# CPU seconds beyond what a call's time limit allows, before the kernel ends a process that nobody waits for
GRACE_CPU_S = 10


class Log(io.TextIOBase):
    """Takes what a function prints; keeps head and tail."""

    def __init__(self) -> None:
        self._capture = Capture(LOG_CAP_BYTES)

    def write(self, text: str) -> int:
        self._capture.feed(text.encode("utf-8", "replace"))
        return len(text)

    def text(self) -> str:
        return self._capture.text()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    lines = os.fdopen(os.dup(0), "rb")
    # what the function reads and prints must not get into the calls and answers
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=read, args=(lines, waiting), daemon=True).start()
    start = waiting.get()
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_DATA, start["memory_mb"] << 20)
    form, hello = load(start)
    send(answers, hello)
    # what is told from now on goes through the answers
    os.dup2(null, 2)
    while form is not None:
        request = waiting.get()
        allow_cpu(request["timeout_s"])
        send(answers, {"id": request["id"], **grade(form, Call(**request["call"]))})


def read(lines: BinaryIO, waiting: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in lines:
        waiting.put(json.loads(line))
    # the parent is gone or has closed: nobody wants what is being computed
    os._exit(0)


def send(answers: BinaryIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def allow_cpu(timeout_s: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(
        resource.RLIMIT_CPU,
        int(used.ru_utime + used.ru_stime + timeout_s * (os.cpu_count() or 1)) + GRACE_CPU_S,
    )


def load(start: Mapping[str, Any]) -> tuple[Form | None, dict[str, Any]]:
    """The function that `start` names, and what the parent is told; None where it cannot be had."""
    sys.path += [entry for entry in start["path"] if entry not in sys.path]
    module_name, _, name = start["spec"].partition(":")
    with quiet():
        try:
            module = importlib.import_module(module_name)
            if not hasattr(module, name):
                return None, {"error": f"module {module_name!r} has no {name!r}"}
            form = form_of(getattr(module, name), Style(start["style"]), start["options"])
        except ModuleNotFoundError as error:
            is_path = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
            if is_path:
                return None, {"error": f"no module named {error.name!r} in this folder or on PYTHONPATH"}
            return None, {"error": f"{module_name!r} cannot be imported: no module named {error.name!r}"}
        except CallError as error:
            return None, {"error": f"{name} {error}"}
        except (Exception, SystemExit) as error:  # noqa: BLE001 whatever a module does when it is imported
            return None, {"error": f"{module_name!r} cannot be imported: {described(error)}"}
    return form, {
        "style": str(form.style), "needs_answer": form.needs_answer, "wanted_columns": form.wanted_columns
    }  # fmt: skip


def grade(form: Form, call: Call) -> dict[str, Any]:
    """Rewards or an error, and what the function printed."""
    with quiet() as log:
        try:
            answer: dict[str, Any] = {"rewards": form.rewards(call)}
        except CallError as error:
            answer = {"error": str(error)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 the boundary of a function that is not ours
            answer = {"error": f"raised {described(error)}"}
        finally:
            # an alarm that it left behind would end this process later
            signal.alarm(0)
    return {**answer, "log": log.text()}


@contextlib.contextmanager
def quiet():
    log = Log()
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        yield log


def described(error: BaseException) -> str:
    """Class, message and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:500] + where


if __name__ == "__main__":
    main()
