"""Small stand-ins for tests: a scripted engine, an in-memory sandbox and a verifier that looks at files. No mocks: each
behaves like the real thing at its interface, and none knows the test that uses it.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from burnish.envs.sandbox.base import ArtifactFile, Artifacts, ExecResult, SandboxCrashed, SandboxError
from burnish.policy.inference.prefill import PrefillEntry, PrefillSource
from burnish.verifiers.types import Verdict


class MemorySandbox:
    """A shell that knows `echo TEXT > FILE`, `cat FILE`, `false`, `crash` and `hang`; files live in memory."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.files: dict[str, bytes] = {}
        self.is_closed = False
        self.has_crashed = False

    def run(self, command: str, timeout_s: float) -> ExecResult:
        if self.has_crashed:
            raise SandboxCrashed(f"{self.id} is not running")
        output, code = "", 0
        if command == "crash":
            self.has_crashed = True
            raise SandboxCrashed(f"{self.id} stopped")
        if command == "unplug":
            raise SandboxError("the engine went away")
        if command == "false":
            code = 1
        elif command == "hang":
            return ExecResult(
                output="", exit_code=None, timed_out=True, truncated=False, total_bytes=0, duration_s=timeout_s
            )
        elif command.startswith("echo ") and ">" in command:
            text, _, name = command.removeprefix("echo ").partition(">")
            self.files[f"/app/{name.strip()}"] = f"{text.strip()}\n".encode()
        elif command.startswith("cat "):
            content = self.files.get(f"/app/{command.removeprefix('cat ').strip()}")
            output, code = ("", 1) if content is None else (content.decode(), 0)
        return ExecResult(
            output=output, exit_code=code, timed_out=False, truncated=False, total_bytes=len(output), duration_s=0.0
        )

    def put_files(self, files: Mapping[str, bytes | Path], destination: str) -> None:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            self.files[f"{destination}/{name}"] = data

    def get_artifacts(self, paths: Sequence[str]) -> Artifacts:
        if self.has_crashed:
            raise SandboxCrashed(f"{self.id} is not running")
        found = [path for path in paths if path in self.files]
        return Artifacts(
            files=tuple(ArtifactFile(path=path, content=self.files[path]) for path in found),
            missing=tuple(path for path in paths if path not in self.files),
        )

    def alive(self) -> bool:
        return not self.has_crashed and not self.is_closed

    def close(self) -> None:
        self.is_closed = True


class MemorySandboxes:
    """Makes MemorySandbox; `open` are those not closed yet.

    Args:
        fail_first: creations that raise SandboxError before the first one succeeds.
    """

    kind = "local"

    def __init__(self, fail_first: int = 0, start_s: float = 0.0) -> None:
        self.made: list[MemorySandbox] = []
        self._failures, self._start_s = fail_first, start_s
        self._mutex = threading.Lock()

    def create(self, task: Any, *, role: str, run_id: str, attempt_id: str) -> MemorySandbox:
        time.sleep(self._start_s)
        with self._mutex:
            if self._failures:
                self._failures -= 1
                raise SandboxError("no space left on device")
            self.made.append(MemorySandbox(f"{role}-{attempt_id}"))
            return self.made[-1]

    @property
    def open(self) -> list[MemorySandbox]:
        return [sandbox for sandbox in self.made if not sandbox.is_closed]

    def close(self) -> None:
        for sandbox in self.open:
            sandbox.close()


class FileVerifier:
    """Reward 1 when the artifact at `path` holds `content`.

    Args:
        fault: raised instead, when given.
    """

    def __init__(self, path: str, content: str, fault: Exception | None = None) -> None:
        self.path, self.content, self.fault = path, content.encode(), fault

    def verify(self, task: Any, artifacts: Artifacts, *, run_id: str, attempt_id: str) -> Verdict:
        if self.fault is not None:
            raise self.fault
        file = artifacts.file(self.path)
        reward = float(file is not None and file.content == self.content)
        return Verdict(
            reward=reward,
            rewards={"reward": reward},
            tests_run=1,
            tests_passed=int(reward),
            log="",
            duration_s=0.0,
            artifacts_hash=artifacts.content_hash,
        )


class EchoVerifier:
    """Grades the tasks `write WORD to FILE`: reward 1 when FILE holds WORD. Loads as `fakes:EchoVerifier`."""

    def __init__(self, sandboxes: Any) -> None:
        self.sandboxes = sandboxes

    def verify(self, task: Any, artifacts: Artifacts, *, run_id: str, attempt_id: str) -> Verdict:
        _, word, _, name = task.instruction.split()
        grader = FileVerifier(f"/app/{name}", f"{word}\n")
        return grader.verify(task, artifacts, run_id=run_id, attempt_id=attempt_id)


class CoinVerifier:
    """Reward 0 or 1 by the slot's name: an untrained policy gets groups with variance. Loads as `fakes:CoinVerifier`."""

    def __init__(self, sandboxes: Any) -> None:
        self.sandboxes = sandboxes

    def verify(self, task: Any, artifacts: Artifacts, *, run_id: str, attempt_id: str) -> Verdict:
        slot_id = attempt_id.rpartition("-")[0]
        reward = float(sha256(slot_id.encode()).digest()[0] & 1)
        return Verdict(
            reward=reward, rewards={"reward": reward}, tests_run=1, tests_passed=int(reward), log="", duration_s=0.0,
            artifacts_hash=artifacts.content_hash,
        )  # fmt: skip


class ScriptedEngine:
    """An engine that says what `reply` says, one token a step, with log-probabilities it makes up from the token.

    Args:
        reply: (ids so far, sampling parameters, policy version) -> ids of the turn.
    """

    def __init__(self, reply: Callable[[list[int], Any, int], Sequence[int]], step_s: float = 0.0) -> None:
        self.policy_version = 0
        self.requests: list[tuple[str, list[int], Any]] = []
        """Everything asked: request id, ids, sampling parameters."""
        self.released: list[str] = []
        self.fault: Exception | None = None
        """Raised by the next step, when set."""
        self._reply, self._step_s = reply, step_s
        self._live: dict[str, Any] = {}

    def add_request(
        self, request_id: str, context_id: str, ids: list[int], sampling: Any, keep_resident: bool = False
    ) -> None:
        from burnish.policy.inference.sequence import Generation

        if request_id in self._live:
            raise ValueError(f"engine: request {request_id} is running already")
        self.requests.append((request_id, list(ids), sampling))
        entry = PrefillEntry(
            hit=0, source=PrefillSource.cold, end=len(ids), decoder_start=0, decoder_floor=0,
            version=self.policy_version, epoch=0,
        )  # fmt: skip
        answer = Generation(
            request_id=request_id, context_id=context_id, prompt_len=len(ids), ids=[], lp_raw=[], lp_behaviour=[],
            versions=[], routes=None, kept=None, finish_reason="", prefill_entries=[entry], cached_tokens=0,
        )  # fmt: skip
        self._live[request_id] = (answer, list(ids), sampling)

    def step(self) -> list[Any]:
        time.sleep(self._step_s)
        if self.fault is not None:
            raise self.fault
        ended = []
        for request_id, (answer, ids, sampling) in list(self._live.items()):
            token = self._reply(ids, sampling, self.policy_version)[len(answer.ids)]
            answer.ids.append(token)
            answer.lp_raw.append(-0.1 - (token % 7) / 10)
            answer.lp_behaviour.append(answer.lp_raw[-1])
            answer.versions.append(self.policy_version)
            if token in sampling.stop_ids or len(answer.ids) == sampling.max_tokens:
                answer.finish_reason = "stop" if token in sampling.stop_ids else "length"
                ended.append(self._live.pop(request_id)[0])
        return ended

    def abort(self, request_id: str) -> Any:
        if request_id not in self._live:
            return None
        answer = self._live.pop(request_id)[0]
        answer.finish_reason = "abort"
        return answer

    def release(self, context_id: str) -> None:
        if any(answer.context_id == context_id for answer, _, _ in self._live.values()):
            raise ValueError(f"engine: context {context_id} is busy")
        self.released.append(context_id)

    def update_weights(self, state_dict: Mapping[str, Any], version: int, mode: str = "recompute") -> None:
        assert mode == "recompute"
        self.policy_version = version

    def stats(self) -> dict[str, Any]:
        return {"requests": len(self.requests)}
