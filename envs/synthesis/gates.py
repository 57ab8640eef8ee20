"""The gates a candidate passes before it is a task: the oracle earns the full reward, doing nothing earns none.

A candidate acts in a fresh sandbox, and each verdict comes from another fresh one. A gate's answer is a reason to
reject, or none; a failure of the infrastructure is neither, it is raised. The oracle gate records what the shell
really answered: that is what a policy is taught with.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from burnish.envs.sandbox.base import Artifacts, Sandbox, SandboxError, SandboxFactory
from burnish.envs.synthesis.spec import OracleTurn
from burnish.envs.synthesis.transcript import RecordedTurn
from burnish.envs.task import Task

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 30.0
# an engine under load fails now and then; a task that fails it three times in a row is not its fault
INFRA_ATTEMPTS = 3


class Graded(Protocol):
    """The part of a verdict that the gates read."""

    reward: float
    tests_run: int


class Grader(Protocol):
    """Grades artifacts; what verifiers.verifier calls a Verifier (this folder may not import that one)."""

    def verify(self, task: Task, artifacts: Artifacts, *, run_id: str, attempt_id: str) -> Graded: ...


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """What the gates found out about one candidate."""

    task_id: str
    content_hash: str
    reason: str
    """Why it was rejected, beginning with the gate's name and a colon; empty when it was not."""
    oracle_reward: float | None = None
    nop_reward: float | None = None
    tests_run: int = 0
    turns: list[RecordedTurn] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def accepted(self) -> bool:
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "turns": [turn.to_json() for turn in self.turns]}

    @staticmethod
    def from_json(record: dict[str, Any]) -> "GateReport":
        return GateReport(**{**record, "turns": [RecordedTurn(**turn) for turn in record["turns"]]})


class Rejected(Exception):
    """A gate said no; the text is the reason."""


class Gates:
    """Runs the gates on one candidate at a time; thread-safe."""

    def __init__(self, sandboxes: SandboxFactory, grader: Grader, run_id: str) -> None:
        self._sandboxes = sandboxes
        self._grader = grader
        self._run_id = run_id

    def check(self, task: Task, oracle: tuple[OracleTurn, ...]) -> GateReport:
        """Both gates, the oracle's first.

        Args:
            task: the written candidate.
            oracle: commands and what they are expected to print.

        Raises:
            SandboxError: the infrastructure failed INFRA_ATTEMPTS times in a row.
        """
        started = time.monotonic()
        for attempt in range(INFRA_ATTEMPTS):
            found: dict[str, Any] = {}
            reason = ""
            try:
                self._pass(task, oracle, found, f"{task.id}-{attempt}")
            except Rejected as rejection:
                reason = str(rejection)
            except SandboxError as error:
                if attempt == INFRA_ATTEMPTS - 1:
                    raise
                logger.warning("%s: the sandbox failed, trying again: %s", task.id, error)
                continue
            seconds = round(time.monotonic() - started, 3)
            return GateReport(task_id=task.id, content_hash=task.content_hash, reason=reason, seconds=seconds, **found)
        raise AssertionError("unreachable")

    def _pass(self, task: Task, oracle: tuple[OracleTurn, ...], found: dict[str, Any], attempt_id: str) -> None:
        sandbox = self._sandboxes.create(task, role="agent", run_id=self._run_id, attempt_id=attempt_id)
        try:
            # an agent that does nothing leaves what a fresh sandbox holds; reading it runs nothing inside
            untouched = sandbox.get_artifacts(task.config.artifacts)
            found["turns"] = play(oracle, sandbox)
            solved = sandbox.get_artifacts(task.config.artifacts)
        finally:
            sandbox.close()
        graded = self._grade(task, solved, "oracle", attempt_id)
        found["oracle_reward"] = graded.reward
        found["tests_run"] = graded.tests_run
        if graded.reward != 1:
            raise Rejected(f"oracle: its solution earns a reward of {graded.reward:g}, not 1")
        graded = self._grade(task, untouched, "nop", attempt_id)
        found["nop_reward"] = graded.reward
        if graded.reward != 0:
            raise Rejected(f"nop: doing nothing earns a reward of {graded.reward:g}")

    def _grade(self, task: Task, artifacts: Artifacts, gate: str, attempt_id: str) -> Graded:
        try:
            graded = self._grader.verify(task, artifacts, run_id=self._run_id, attempt_id=f"{attempt_id}-{gate}")
        except SandboxError:
            raise
        except RuntimeError as error:
            # VerifierError, which this folder cannot name: tests without a verdict are the candidate's fault
            raise Rejected(f"{gate}: the tests gave no verdict ({error})") from error
        if graded.tests_run < 1:
            raise Rejected(f"{gate}: no test ran")
        return graded


def play(oracle: tuple[OracleTurn, ...], sandbox: Sandbox) -> list[RecordedTurn]:
    """Runs the oracle's commands and records what the shell answers.

    Raises:
        Rejected: a command does not end, fails, or prints something else than it should.
    """
    turns: list[RecordedTurn] = []
    for turn in oracle:
        result = sandbox.run(turn.command, COMMAND_TIMEOUT_S)
        if result.exit_code is None or result.timed_out:
            raise Rejected(f"oracle: {turn.command!r} did not end within {COMMAND_TIMEOUT_S:g} s")
        if result.exit_code != 0:
            raise Rejected(f"oracle: {turn.command!r} ended with exit code {result.exit_code}")
        if result.output != turn.output:
            raise Rejected(f"oracle: {turn.command!r} printed {result.output!r}, expected {turn.output!r}")
        turns.append(RecordedTurn(command=turn.command, output=result.output, exit_code=result.exit_code))
    return turns
