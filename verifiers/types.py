"""What grading returns, and what can become of an attempt. Knows no task and no sandbox."""

from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """What happened to an attempt, exactly one. Only the first three carry a reward."""

    finished = "finished"
    budget_exhausted = "budget_exhausted"
    """Turns, tokens or wall clock ran out; graded as it stands."""
    agent_crashed_env = "agent_crashed_env"
    """What the agent ran ended its sandbox: the task's lowest reward, without a test."""
    infra_failed = "infra_failed"
    verifier_failed = "verifier_failed"
    cancelled = "cancelled"

    @property
    def has_reward(self) -> bool:
        return self in (Outcome.finished, Outcome.budget_exhausted, Outcome.agent_crashed_env)


class VerifierError(RuntimeError):
    """Grading gave no valid verdict (time limit, no reward, no proof that tests ran). Never a reward of 0."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A valid grade and its evidence."""

    reward: float
    """The scalar that is trained on, within the task's declared range ([0, 1] by default)."""
    rewards: dict[str, float]
    """Everything the tests wrote, `reward` included."""
    tests_run: int
    """Tests that ran and were judged; at least 1 where a verifier gave the verdict, 0 where the agent crashed its sandbox."""
    tests_passed: int
    log: str = field(repr=False)
    """Output of the tests, head and tail."""
    duration_s: float
    artifacts_hash: str
    """Content hash of what was graded: the same artifacts can be graded again."""
    is_reused: bool = False
    """The verdict of an earlier attempt of this task that left the same artifacts."""
