"""The same artifacts of the same task get the same verdict: graded once, in a fresh sandbox, and not again.

For verifiers whose verdict is a function of the artifacts. Siblings of a group often leave the very same files, and a fresh
container costs more than everything else of an episode. Failures of a verifier are never kept.
"""

import threading
from collections import OrderedDict
from dataclasses import replace

from burnish.envs.sandbox.base import Artifacts
from burnish.envs.task import Task
from burnish.verifiers.types import Verdict
from burnish.verifiers.verifier import Verifier

KEPT_VERDICTS = 4096


class ReusedVerdicts:
    """A verifier in front of another one. Thread-safe; attempts that wait for each other's verdict grade once.

    Args:
        verifier: asked for artifacts that were not graded before.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self._mutex = threading.Lock()
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._grading: dict[tuple[str, str], threading.Lock] = {}

    def verify(self, task: Task, artifacts: Artifacts, *, run_id: str, attempt_id: str) -> Verdict:
        """A kept verdict says `is_reused` and took no time; see `Verifier.verify`."""
        key = (task.content_hash, artifacts.content_hash)
        with self._mutex:
            turn = self._grading.setdefault(key, threading.Lock())
        with turn:
            with self._mutex:
                verdict = self._verdicts.get(key)
            if verdict is not None:
                return replace(verdict, is_reused=True, duration_s=0.0)
            verdict = self.verifier.verify(task, artifacts, run_id=run_id, attempt_id=attempt_id)
            with self._mutex:
                self._verdicts[key] = verdict
                while len(self._verdicts) > KEPT_VERDICTS:
                    oldest, _ = self._verdicts.popitem(last=False)
                    self._grading.pop(oldest, None)
            return verdict
