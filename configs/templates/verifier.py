"""The verifier NewVerifier: the share of a task's hidden tests that pass, where `hidden_tests` gives all or nothing.

Use it as `verifier=burnish.configs.templates.verifier:NewVerifier`, with this folder on PYTHONPATH.
"""

from dataclasses import replace

from burnish.envs.sandbox.base import Artifacts, SandboxFactory
from burnish.envs.task import Task
from burnish.verifiers.hidden_tests import HiddenTests
from burnish.verifiers.types import Verdict


class NewVerifier:
    """Thread-safe: a process has one, and it grades many episodes at a time.

    Args:
        sandboxes: where anything that has to be run is run; `run_once` gives a fresh one.
    """

    def __init__(self, sandboxes: SandboxFactory) -> None:
        self._tests = HiddenTests(sandboxes)

    def verify(self, task: Task, artifacts: Artifacts, *, run_id: str, attempt_id: str) -> Verdict:
        """Grades what the agent left; nothing of it may be run outside of a sandbox.

        Raises:
            VerifierError: no verdict could be reached: the attempt is tried again, it does not count as 0.
            SandboxError: the infrastructure failed.
        """
        verdict = self._tests.verify(task, artifacts, run_id=run_id, attempt_id=attempt_id)
        low, high = task.config.reward_range
        reward = low + (high - low) * verdict.tests_passed / verdict.tests_run
        return replace(verdict, reward=reward, rewards={**verdict.rewards, "reward": reward})
