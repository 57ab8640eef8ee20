"""The verdict of one trajectory, again. A completion is stored in the ledger and is graded as it stands; of a sandbox
nothing is kept, so the recorded commands run again in a fresh one and what they leave is graded.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from burnish.envs.prompts.promptset import completion_artifacts
from burnish.envs.sandbox.base import (
    Artifacts,
    Sandbox,
    SandboxCrashed,
    SandboxError,
    SandboxFactory,
    SandboxUnavailable,
)
from burnish.envs.task import Task
from burnish.rollout.config import RlRun
from burnish.rollout.harness.base import Finish, Harness
from burnish.rollout.sources import (
    acts_on_prompts,
    close_verifier,
    load_tasks,
    open_harness,
    open_machines,
    open_verifier,
)
from burnish.rollout.types import RolloutError, Trajectory, Turn
from burnish.verifiers.types import Outcome, Verdict, VerifierError

COMPARED = ("reward", "rewards", "tests_run", "tests_passed")
"""What two verdicts have to agree in; time and log differ from run to run."""


@dataclass(kw_only=True)
class Regraded:
    """What became of grading once more."""

    how: str
    """What was graded, and where it came from."""
    recorded: dict[str, Any]
    again: dict[str, Any] | None = None
    problem: str = ""
    """Why there is no second verdict."""
    turns_played: int = 0
    turns_that_differ: list[int] = field(default_factory=list)
    """Turns whose command now prints something else than the policy was shown."""
    same_artifacts: bool | None = None
    """Whether what was graded is the same to the byte; None where that was not recorded."""

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """name -> (recorded, again)."""
        if self.again is None:
            return {}
        return {n: (self.recorded[n], self.again[n]) for n in self.recorded if self.recorded[n] != self.again[n]}

    @property
    def is_equal(self) -> bool:
        return self.again is not None and not self.differences


class PlayedOut(Exception):
    """A command took its sandbox down."""


def regrade(run: RlRun, trajectory: Trajectory, task_set: str) -> Regraded | None:
    """Grades an attempt again; None where it ended without a verdict, so that there is nothing to compare with.

    Args:
        run: settings of the run; its `sandbox` is where commands run.
        task_set: hash of the tasks that the run was started with.

    Raises:
        UserError: harness or verifier cannot be loaded.
    """
    if trajectory.verdict is None:
        return None
    recorded = {"outcome": str(trajectory.outcome), **{n: asdict(trajectory.verdict)[n] for n in COMPARED}}
    result = Regraded(how="nothing", recorded=recorded)
    try:
        tasks = load_tasks(run)
    except (ValueError, OSError) as error:
        result.problem = f"the tasks cannot be read any more: {' '.join(str(error).split())}"
        return result
    if tasks.content_hash != task_set:
        result.problem = "the tasks have changed since the run was started, so another verdict would say nothing"
        return result
    (task,) = [task for task in tasks.tasks if task.id == trajectory.slot.task_id]
    harness = open_harness(run)
    try:
        sandboxes = open_machines(run)
    except SandboxUnavailable as error:
        result.problem = f"its commands cannot be run again: {error}"
        return result
    try:
        verifier = open_verifier(run, sandboxes)
        try:
            _grade(run, trajectory, task, harness, sandboxes, verifier, result)
        finally:
            close_verifier(verifier)
    finally:
        if sandboxes is not None:
            sandboxes.close()
    return result


def _grade(
    run: RlRun,
    trajectory: Trajectory,
    task: Task,
    harness: Harness,
    sandboxes: SandboxFactory | None,
    verifier: Any,
    result: Regraded,
) -> None:
    owner = {"run_id": f"replay-{run.name}", "attempt_id": f"replay-{trajectory.attempt_id}-{os.getpid()}"}
    assert trajectory.verdict is not None
    try:
        if acts_on_prompts(run) or sandboxes is None:
            result.how = "the completion, as the ledger holds it"
            artifacts = completion_artifacts(trajectory.turns[-1].action if trajectory.turns else "")
        else:
            result.how = f"what the recorded commands leave in a fresh sandbox ({sandboxes.kind})"
            artifacts = _played(run, trajectory, task, harness, sandboxes, owner, result)
        verdict: Verdict = verifier.verify(task, artifacts, **owner)
    except PlayedOut:
        low = task.config.reward_range[0]
        crashed: dict[str, Any] = {"outcome": str(Outcome.agent_crashed_env), "reward": low, "rewards": {}}
        result.again = crashed | {"tests_run": 0, "tests_passed": 0}
    except (SandboxError, VerifierError, RolloutError) as error:
        result.problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    else:
        # how the episode ended is not graded again; that its sandbox lived on is
        outcome = str(trajectory.outcome)
        ended = "not agent_crashed_env" if trajectory.outcome is Outcome.agent_crashed_env else outcome
        result.again = {"outcome": ended, **{n: asdict(verdict)[n] for n in COMPARED}}
        if trajectory.verdict.artifacts_hash:
            result.same_artifacts = trajectory.verdict.artifacts_hash == verdict.artifacts_hash


def _played(
    run: RlRun,
    trajectory: Trajectory,
    task: Task,
    harness: Harness,
    sandboxes: SandboxFactory,
    owner: Mapping[str, str],
    result: Regraded,
) -> Artifacts:
    """Artifacts after the recorded commands, as the policy gave them.

    Raises:
        PlayedOut: a command took the sandbox down.
    """
    sandbox = sandboxes.create(task, role="agent", **owner)
    try:
        for turn in trajectory.turns:
            if not _play(run, turn, harness, sandbox, trajectory, result):
                break
        return sandbox.get_artifacts(task.config.artifacts)
    except SandboxCrashed as error:
        if not result.turns_played:
            raise
        raise PlayedOut from error
    finally:
        sandbox.close()


def _play(run: RlRun, turn: Turn, harness: Harness, sandbox: Sandbox, trajectory: Trajectory, result: Regraded) -> bool:
    """Runs the command of a turn as it was run then; False where the episode ended before that."""
    if turn.finish_reason != "stop":
        return False
    action = harness.parse(turn.action)
    was_run = turn.exit_code is not None or turn.timed_out
    took_it_down = trajectory.outcome is Outcome.agent_crashed_env and turn is trajectory.turns[-1]
    if isinstance(action, Finish) or not (was_run or took_it_down):
        return False
    result.turns_played += 1
    answer = sandbox.run(action.command, run.episode.command_timeout_s)
    if was_run and harness.observe(answer).content != turn.observation:
        result.turns_that_differ.append(turn.index)
    return True
