"""NewVerifier by hand: which results earn which reward, and which are no verdict at all."""

import json
from pathlib import Path
from typing import Any

import pytest

import burnish.envs.task
from burnish.configs.templates.verifier import NewVerifier
from burnish.envs.sandbox.base import ArtifactFile, Artifacts, OneShot
from burnish.envs.task import load_task
from burnish.verifiers.types import VerifierError

SAMPLES = Path(burnish.envs.task.__file__).with_name("tasks")


class Ended:
    """Stands in for the sandboxes: the tests of any task end with these states and this reward."""

    def __init__(self, *states: str, reward: str = "0") -> None:
        report = json.dumps({"results": {"tests": [{"name": str(i), "status": s} for i, s in enumerate(states)]}})
        self.files = {"/logs/verifier/ctrf.json": report, "/logs/verifier/reward.txt": reward}

    def run_once(self, task: Any, **settings: Any) -> OneShot:
        found = tuple(ArtifactFile(path=path, content=text.encode()) for path, text in self.files.items())
        return OneShot(exit_code=0, timed_out=False, duration_s=0.1, artifacts=Artifacts(files=found))


def graded(ended: Any) -> float:
    task = load_task(min(path for path in SAMPLES.iterdir() if path.is_dir()))
    return NewVerifier(ended).verify(task, Artifacts(), run_id="test", attempt_id="test").reward


@pytest.mark.parametrize(
    ("states", "reward", "expected"),
    [(["passed", "passed"], "1", 1.0), (["passed", "failed"], "0", 0.5), (["failed", "failed"], "0", 0.0)],
)
def test_reward_is_the_share_of_tests_that_pass(states, reward, expected):
    assert graded(Ended(*states, reward=reward)) == expected


def test_no_test_is_no_verdict():
    with pytest.raises(VerifierError):
        graded(Ended())
