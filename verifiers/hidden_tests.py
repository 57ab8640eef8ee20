"""Grades by running a task's hidden tests in a fresh sandbox on the declared artifacts, and nothing else of the agent's.

The agent's sandbox plays no part: interpreter, shell and tools come from the verifier's own image, the tests from the task
folder, and the reward is read from outside after the last process has ended. A reward counts only with proof that at
least one test ran; whatever is odd (no file, not a regular file, not a number, time limit) is no verdict, never a 0.
"""

import json
import math
import re
import time
from dataclasses import dataclass
from typing import Any

from burnish.envs.sandbox.base import Artifacts, OneShot, SandboxFactory
from burnish.envs.sandbox.capture import Capture
from burnish.envs.task import Task
from burnish.verifiers.types import Verdict, VerifierError

RESULT_DIR = "/logs/verifier"
MAX_RESULT_BYTES = 64 << 10
MAX_REPORT_BYTES = 16 << 20
LOG_CAP_BYTES = 20_000
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
# test.sh starts where the agent has nothing, so a planted module or conftest is not found first; its exit code means nothing.
# its #! line is followed by hand: the kernel refuses to run a file that any process still has open for writing
SCRIPT = (
    "cd /tests && IFS= read -r first < test.sh; first=${first%$'\\r'}; "
    '[[ $first == "#!"* ]] && first=${first:2} || first=bash; '
    "exec $first ./test.sh > /logs/verifier/test-stdout.txt 2>&1"
)
COMMAND = ("bash", "--noprofile", "--norc", "-c", SCRIPT)
ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ctrf.json proves."""

    tests_run: int
    """Tests that passed or failed; skipped and pending ones prove nothing."""
    tests_passed: int


class HiddenTests:
    """The default verifier. Thread-safe: a verdict needs nothing but the task and the artifacts."""

    def __init__(self, sandboxes: SandboxFactory) -> None:
        self.sandboxes = sandboxes

    def verify(self, task: Task, artifacts: Artifacts, *, run_id: str, attempt_id: str) -> Verdict:
        """Runs tests/test.sh and reads its verdict.

        Raises:
            VerifierError: no valid verdict.
            SandboxError: the infrastructure failed.
        """
        started = time.monotonic()
        files = {f"/tests/{path.relative_to(task.tests_dir).as_posix()}": path for path in task.tests_dir.rglob("*")}
        done = self.sandboxes.run_once(
            task,
            run_id=run_id,
            attempt_id=attempt_id,
            artifacts=artifacts,
            files={place: path for place, path in files.items() if path.is_file()},
            command=COMMAND,
            env={**ENVIRONMENT, **task.config.verifier_env},
            timeout_s=task.config.verifier_timeout_s,
            collect=RESULT_DIR,
        )
        log = test_log(done.artifacts)
        try:
            rewards, report = read_result(task, done)
        except VerifierError as error:
            raise VerifierError(f"{task.id}: {error}; the tests wrote: {log[-500:].strip() or 'nothing'}") from None
        return Verdict(
            reward=rewards["reward"],
            rewards=rewards,
            tests_run=report.tests_run,
            tests_passed=report.tests_passed,
            log=log,
            duration_s=time.monotonic() - started,
            artifacts_hash=artifacts.content_hash,
        )


def test_log(found: Artifacts) -> str:
    file = found.file(f"{RESULT_DIR}/test-stdout.txt")
    capture = Capture(LOG_CAP_BYTES)
    capture.feed(b"" if file is None else file.content)
    return capture.text()


def read_result(task: Task, done: OneShot) -> tuple[dict[str, float], Report]:
    """Rewards, `reward` among them, and the proof that tests ran.

    Raises:
        VerifierError: saying what is missing or odd.
    """
    if done.timed_out:
        # a reward that was written before counts no more than none: the tests did not end
        raise VerifierError(f"the tests did not end within verifier.timeout_sec = {task.config.verifier_timeout_s:g}")
    rewards = read_rewards(done)
    low, high = task.config.reward_range
    if not low <= rewards["reward"] <= high:
        raise VerifierError(f"reward {rewards['reward']:g} is outside [{low:g}, {high:g}]")
    report = read_report(done.artifacts)
    if rewards["reward"] > low and report.tests_passed == 0:
        raise VerifierError(f"reward {rewards['reward']:g}, but none of {report.tests_run} tests passed")
    return rewards, report


def content(found: Artifacts, name: str, max_bytes: int) -> bytes | None:
    """Bytes of one result file, None when it is not there.

    Raises:
        VerifierError: it is there, but not a regular file of a sane size.
    """
    path = f"{RESULT_DIR}/{name}"
    for rejected, why in found.rejected:
        if rejected == path:
            raise VerifierError(f"{path}: {why}")
    if path in found.directories:
        raise VerifierError(f"{path} is a directory")
    file = found.file(path)
    if file is None:
        return None
    if len(file.content) > max_bytes:
        raise VerifierError(f"{path} has {len(file.content)} bytes, more than {max_bytes}")
    return file.content


def read_rewards(done: OneShot) -> dict[str, float]:
    """reward.json wins over reward.txt; when it is there but wrong, that is no verdict."""
    found = done.artifacts
    as_json = content(found, "reward.json", MAX_RESULT_BYTES)
    as_text = content(found, "reward.txt", MAX_RESULT_BYTES)
    if as_json is not None:
        return rewards_of_json(as_json)
    if as_text is not None:
        text = as_text.decode("utf-8", "replace").strip()
        # stricter than float(): no underscores, no other alphabets' digits, no nan
        if not NUMBER.fullmatch(text, 0) or not text.isascii() or not math.isfinite(float(text)):
            raise VerifierError(f"{RESULT_DIR}/reward.txt holds no number: {text[:80]!r}")
        return {"reward": float(text)}
    if found.file(f"{RESULT_DIR}/rewards.json") is not None:
        raise VerifierError(f"{RESULT_DIR}/rewards.json is not read; the file's name is reward.json")
    if any(path == RESULT_DIR for path, _ in found.rejected) or found.missing:
        raise VerifierError(f"{RESULT_DIR} cannot be read: {[*found.rejected, *found.missing][:1]}")
    raise VerifierError(
        f"test.sh left neither reward.json nor reward.txt in {RESULT_DIR} (its exit code: {done.exit_code})"
    )


def parse_json(data: bytes, name: str) -> Any:
    def no_constant(word: str) -> float:
        raise ValueError(f"{word} is not a number")

    def no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key is given twice")
        return table

    try:
        return json.loads(data.decode("utf-8"), parse_constant=no_constant, object_pairs_hook=no_twice)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"{RESULT_DIR}/{name} is not JSON: {error}") from None


def rewards_of_json(data: bytes) -> dict[str, float]:
    table = parse_json(data, "reward.json")
    if not isinstance(table, dict) or not table:
        raise VerifierError(f"{RESULT_DIR}/reward.json must hold an object of numbers, got {str(table)[:80]}")
    for key, value in table.items():
        # true and false count as 1 and 0, as in Harbor; a whole number may be too large for a float
        if not isinstance(value, int | float) or abs(value) > 1e308 or not math.isfinite(value):
            raise VerifierError(f"{RESULT_DIR}/reward.json: {key!r} is not a finite number: {str(value)[:80]!r}")
    rewards = {key: float(value) for key, value in table.items()}
    if "reward" not in rewards:
        if len(rewards) > 1:
            raise VerifierError(
                f"{RESULT_DIR}/reward.json has no key `reward`, only {', '.join(sorted(rewards))[:200]}"
            )
        rewards["reward"] = next(iter(rewards.values()))
    return rewards


def read_report(found: Artifacts) -> Report:
    """Raises:
    VerifierError: ctrf.json is missing, unreadable, or shows no test that ran.
    """
    data = content(found, "ctrf.json", MAX_REPORT_BYTES)
    if data is None:
        raise VerifierError(f"no {RESULT_DIR}/ctrf.json: nothing proves that a test ran")
    table = parse_json(data, "ctrf.json")
    results = table.get("results") if isinstance(table, dict) else None
    if not isinstance(results, dict):
        raise VerifierError(f"{RESULT_DIR}/ctrf.json has no `results`")
    tests = results.get("tests")
    if isinstance(tests, list):
        states = [test.get("status") if isinstance(test, dict) else None for test in tests]
    else:
        states = states_of_summary(results.get("summary"))
    report = Report(
        tests_run=sum(state in ("passed", "failed", "other") for state in states),
        tests_passed=states.count("passed"),
    )
    if report.tests_run == 0:
        raise VerifierError(f"{RESULT_DIR}/ctrf.json shows no test that ran")
    return report


def states_of_summary(summary: object) -> list[str]:
    if not isinstance(summary, dict):
        raise VerifierError(f"{RESULT_DIR}/ctrf.json has neither `tests` nor `summary`")
    states: list[str] = []
    for name in ("passed", "failed", "other"):
        count = summary.get(name, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 1_000_000:
            raise VerifierError(f"{RESULT_DIR}/ctrf.json: summary.{name} is no count: {str(count)[:80]}")
        states += [name] * count
    return states
