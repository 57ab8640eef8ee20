"""Grades by a function that a user or this folder gives: `fn(completion=..., answer=..., ...) -> number`.

The function runs in a process of its own, a few of them side by side, each call under a time limit. One that raises,
hangs, dies or returns no finite number gives no verdict (outcome `verifier_failed`), never a 0.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from burnish.envs.errors import UserError
from burnish.envs.prompts.promptset import Prompt, completion_of
from burnish.envs.sandbox.base import Artifacts
from burnish.envs.task import Task
from burnish.verifiers.calls import Call
from burnish.verifiers.config import GradingConfig
from burnish.verifiers.function_process import FunctionProcess, ProcessFault
from burnish.verifiers.types import Verdict, VerifierError

BUILT_IN = {
    "exact": "burnish.verifiers.answers:exact",
    "number": "burnish.verifiers.answers:number",
    "math": "burnish.verifiers.answers:math",
    "reasoning_gym": "burnish.verifiers.procedural:score",
}


class FunctionVerifier:
    """Scores completions of prompts with a function. Thread-safe.

    Args:
        spec: a built-in name or `package.module:function`.

    Raises:
        UserError: saying which part of `spec` does not resolve, or why the function cannot be called.
    """

    def __init__(self, spec: str, config: GradingConfig) -> None:
        self.spec, self.config = spec, config
        path = BUILT_IN.get(spec, spec)
        module, colon, name = path.partition(":")
        if not colon or not module or not name:
            raise UserError(
                f"verifier {spec!r} is neither a built-in ({', '.join(BUILT_IN)}) nor an import path `package.module:function`"
            )
        self._path = path
        self._free = threading.Semaphore(config.processes)
        self._idle: queue.SimpleQueue[FunctionProcess] = queue.SimpleQueue()
        self._is_closed = False
        try:
            first = FunctionProcess(path, config)
        except UserError as error:
            raise UserError(f"verifier {spec!r}: {error}") from None
        self._hello = first.hello
        self._idle.put(first)

    def check(self, tasks: Sequence[Task]) -> None:
        """Whether the function gets what it needs from every prompt.

        Raises:
            UserError: a prompt lacks its answer or a column.
        """
        for task in tasks:
            if not isinstance(task, Prompt):
                raise UserError(
                    f"{task.where}: verifier {self.spec!r} is a function: it grades prompts, not task folders"
                )
            if self._hello["needs_answer"] and task.answer is None:
                raise UserError(
                    f"{task.where}: verifier {self.spec!r} compares with an answer, and no column is said to hold it; give "
                    f"data.columns.answer="
                )
            for name in self._hello["wanted_columns"]:
                if name not in task.columns:
                    raise UserError(f"{task.where}: column {name} is missing; verifier {self.spec!r} wants it")

    def verify(self, task: Task, artifacts: Artifacts, *, run_id: str, attempt_id: str) -> Verdict:
        """Raises:
        VerifierError: the function gave no reward in range.
        """
        if not isinstance(task, Prompt):
            raise VerifierError(f"{task.id}: {self.spec} grades prompts, not task folders")
        started = time.monotonic()
        call = Call(
            completion=completion_of(artifacts),
            prompt=task.question,
            answer=task.answer,
            data_source=task.data_source,
            extra=task.extra,
            columns=task.columns,
        )
        answer = self._ask(task, call)
        if "error" in answer:
            printed = f"; it printed: {answer['log'][-500:].strip()}" if answer["log"].strip() else ""
            raise VerifierError(f"{task.id}: {self.spec} {answer['error']}{printed}")
        rewards: dict[str, float] = answer["rewards"]
        low, high = task.config.reward_range
        if not low <= rewards["reward"] <= high:
            raise VerifierError(
                f"{task.id}: {self.spec} gave {rewards['reward']:g}, outside data.reward_range=[{low:g},{high:g}]"
            )
        return Verdict(
            reward=rewards["reward"],
            rewards=rewards,
            tests_run=1,
            tests_passed=int(rewards["reward"] >= high),
            log=answer["log"],
            duration_s=time.monotonic() - started,
            artifacts_hash=artifacts.content_hash,
        )

    def close(self) -> None:
        """Ends the idle processes; one that is asked right now is ended by whoever asks."""
        self._is_closed = True
        while (process := self._next_idle()) is not None:
            process.close()

    def _ask(self, task: Task, call: Call) -> dict[str, Any]:
        # waiting for a process is not the function's time
        with self._free:
            process = self._living()
            try:
                answer = process.ask(call, self.config.timeout_s)
            except ProcessFault as fault:
                process.close()
                raise VerifierError(f"{task.id}: {self.spec} {fault}") from None
            self._idle.put(process)
        if self._is_closed:
            self.close()
        return answer

    def _living(self) -> FunctionProcess:
        while (process := self._next_idle()) is not None:
            if process.is_alive:
                return process
            process.close()
        try:
            return FunctionProcess(self._path, self.config)
        except UserError as error:
            raise VerifierError(f"{self.spec}: {error}") from None

    def _next_idle(self) -> FunctionProcess | None:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return None
