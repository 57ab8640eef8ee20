"""Verdicts that are reused: the same task and artifacts, nothing else, and never a failure."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest

from burnish.envs.sandbox.base import ArtifactFile, Artifacts
from burnish.envs.task import Task, TaskConfig
from burnish.verifiers.reused import ReusedVerdicts
from burnish.verifiers.types import Verdict, VerifierError

TASK = Task(id="t", path=Path("t"), instruction="do", config=TaskConfig(artifacts=("/app",)), content_hash="1")


class Counting:
    """Reward 1 for the content b"1"; fails on b"bad" at its first try."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def verify(self, task, artifacts, *, run_id, attempt_id):
        self.asked.append(attempt_id)
        sleep(0.02)
        content = artifacts.files[0].content
        if content == b"bad" and self.asked.count(attempt_id) == 1:
            raise VerifierError("no verdict")
        reward = float(content == b"1")
        return Verdict(
            reward=reward, rewards={"reward": reward}, tests_run=1, tests_passed=int(reward), log="", duration_s=0.02,
            artifacts_hash=artifacts.content_hash,
        )  # fmt: skip


def files(content: bytes, mode: int = 0o644) -> Artifacts:
    return Artifacts(files=(ArtifactFile(path="/app/x", mode=mode, content=content),))


def test_the_same_artifacts_of_the_same_task_are_graded_once_also_at_the_same_time():
    inner = Counting()
    verifier = ReusedVerdicts(inner)
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(
            threads.map(
                lambda i: verifier.verify(TASK, files(b"%d" % (i % 2)), run_id="r", attempt_id=str(i)), range(8)
            )
        )
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0] * 4
    assert len(inner.asked) == 2
    assert sum(not verdict.is_reused for verdict in verdicts) == 2
    assert all(verdict.duration_s == 0.0 for verdict in verdicts if verdict.is_reused)


def test_another_task_mode_or_content_is_graded():
    inner = Counting()
    verifier = ReusedVerdicts(inner)
    for task, artifacts in (
        (TASK, files(b"1")),
        (replace(TASK, content_hash="2"), files(b"1")),
        (TASK, files(b"1", mode=0o755)),
        (TASK, files(b"2")),
    ):
        assert not verifier.verify(task, artifacts, run_id="r", attempt_id="a").is_reused
    assert len(inner.asked) == 4


def test_a_failure_is_not_kept():
    verifier = ReusedVerdicts(Counting())
    with pytest.raises(VerifierError):
        verifier.verify(TASK, files(b"bad"), run_id="r", attempt_id="a")
    assert not verifier.verify(TASK, files(b"bad"), run_id="r", attempt_id="a").is_reused
    assert verifier.verify(TASK, files(b"bad"), run_id="r", attempt_id="b").is_reused
