"""One agent, one task: agent <-> harness <-> sandbox until a stop, then the verifier. Ends in exactly one outcome.

The only place of the platform with a broad `except`: whatever an episode suffers is classified here, once, at the
boundary it crossed, and stored on the trajectory; siblings go on. A failure of infrastructure or of the verifier never
becomes a reward. Who the agent is (policy, oracle, nop) makes no difference to this path.

Sandboxes and verifiers are synchronous: they run in the caller's threads. Every wait has a deadline that names its holder.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from burnish.envs.prompts.promptset import completion_artifacts
from burnish.envs.sandbox.base import (
    Artifacts,
    ExecResult,
    Sandbox,
    SandboxCrashed,
    SandboxError,
    SandboxFactory,
)
from burnish.envs.task import Task
from burnish.policy.encoding.messages import Message
from burnish.rollout.config import EpisodeConfig
from burnish.rollout.harness.base import Finish, Harness
from burnish.rollout.types import (
    BlockRef,
    Context,
    GenerationError,
    HarnessError,
    Slot,
    StopReason,
    Trajectory,
    Turn,
)
from burnish.verifiers.types import Outcome, Verdict, VerifierError
from burnish.verifiers.verifier import Verifier

logger = logging.getLogger(__name__)
T = TypeVar("T")

# seconds a thread may overrun the limit that its callee was given, before the episode stops waiting for it
GRACE_S = 60.0
# seconds to make or remove a sandbox, and to grade: bounds a hang, far above what a busy machine needs
SANDBOX_DEADLINE_S = 300.0
GRADE_DEADLINE_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Speech:
    """One assistant turn."""

    content: str
    finish_reason: str = "stop"
    """stop, or the budget that ran out while the agent spoke: a StopReason's name."""
    num_input_tokens: int = 0
    num_sampled_tokens: int = 0
    context_id: str = "0"


class Agent(Protocol):
    """Whoever acts. One object an episode."""

    async def speak(self, deadline: float) -> Speech:
        """The next assistant turn.

        Args:
            deadline: monotonic seconds at which the episode's wall clock runs out.

        Raises:
            GenerationError: no turn can be had, for a reason that is not the agent's.
        """
        ...

    def hear(self, message: Message) -> None:
        """A message that follows the turn just spoken."""
        ...

    def finish(self) -> tuple[tuple[Context, ...], tuple[BlockRef, ...]]:
        """Contexts and sealed blocks; durable when this returns. Called exactly once, whatever happened."""
        ...

    async def release(self) -> None:
        """Gives up what the agent holds elsewhere (a running request, a resident context). Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class Services:
    """The live collaborators that all episodes of a process share."""

    run_id: str
    harness: Harness
    sandboxes: SandboxFactory | None
    """None where the harness needs no machine: the last thing that the agent said is then all there is to grade."""
    verifier: Verifier | None
    """None grades nothing: episodes end with their outcome and no verdict."""
    threads: Executor
    """One thread an episode at least: sandbox and verifier calls block."""
    policy_version: Callable[[], int] = lambda: 0
    """Version of the weights that now answer."""

    async def in_thread(self, holder: str, deadline_s: float, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`call` in a thread.

        Raises:
            SandboxError: no answer within `deadline_s`; names the holder.
        """
        loop = asyncio.get_running_loop()
        waiting = loop.run_in_executor(self.threads, lambda: call(*args, **kwargs))
        try:
            return await asyncio.wait_for(waiting, deadline_s)
        except TimeoutError as error:
            raise SandboxError(f"{holder} did not answer within {deadline_s:.0f} s") from error


class EnvCrashError(RuntimeError):
    """The agent's command took its own sandbox down: a consequence for the agent, not an infrastructure failure."""


async def run_episode(
    slot: Slot, attempt_id: str, task: Task, agent: Agent, services: Services, budget: EpisodeConfig
) -> Trajectory:
    """Plays one episode to its outcome. Never raises for what an episode can suffer; a cancellation is an outcome too."""
    return await _Episode(slot, attempt_id, task, agent, services, budget).run()


class _Episode:
    def __init__(
        self, slot: Slot, attempt_id: str, task: Task, agent: Agent, services: Services, budget: EpisodeConfig
    ) -> None:
        self.slot, self.attempt_id, self.task = slot, attempt_id, task
        self.agent, self.services, self.budget = agent, services, budget
        self.turns: list[Turn] = []
        self.boundary = "harness"
        self.sandbox_waiting: asyncio.Task[Sandbox] | None = None
        self.closing: set[asyncio.Task[None]] = set()
        self.times: dict[str, float] = {}

    async def run(self) -> Trajectory:
        started, version_start = time.monotonic(), self.services.policy_version()
        outcome, verdict, error = Outcome.infra_failed, None, ""
        try:
            limit_s = min(self.budget.wall_clock_s, self.task.config.agent_timeout_s or self.budget.wall_clock_s)
            stop = await self.act(started + limit_s)
            outcome = Outcome.finished if stop is StopReason.exit else Outcome.budget_exhausted
            verdict = await self.grade()
        except EnvCrashError as failure:
            # failed with a consequence: the lowest reward, because the agent broke its own machine; no test ran
            outcome, stop, error = Outcome.agent_crashed_env, StopReason.env_crash, describe(failure)
            if self.services.verifier is not None:
                verdict = Verdict(
                    reward=self.task.config.reward_range[0],
                    rewards={},
                    tests_run=0,
                    tests_passed=0,
                    log=error,
                    duration_s=0.0,
                    artifacts_hash="",
                )
        except asyncio.CancelledError:
            outcome, stop, error = Outcome.cancelled, StopReason.cancelled, "cancelled"
        except Exception as failure:
            outcome, stop = self.classify(failure)
            error = describe(failure)
            logger.warning("Attempt %s: %s at the %s boundary: %s", self.attempt_id, outcome, self.boundary, error)
            logger.debug("Attempt %s failed", self.attempt_id, exc_info=failure)
        try:
            # in a thread: it waits for the disk
            contexts, blocks = await uninterrupted(
                self.services.in_thread(f"token log of {self.attempt_id}", SANDBOX_DEADLINE_S, self.agent.finish)
            )
        except Exception as failure:  # noqa: BLE001 tokens that are not on disk cannot be trained
            contexts, blocks, verdict = (), (), None
            outcome, stop, error = Outcome.infra_failed, StopReason.generation_error, describe(failure)
        await self.clean_up()
        return Trajectory(
            slot=self.slot,
            attempt_id=self.attempt_id,
            outcome=outcome,
            stop_reason=stop,
            contexts=contexts,
            turns=tuple(self.turns),
            blocks=blocks,
            verdict=verdict,
            is_graded=self.services.verifier is not None,
            error=error,
            version_start=version_start,
            version_end=self.services.policy_version(),
            wall_s=time.monotonic() - started,
            extras=dict(self.times),
        )

    async def act(self, deadline: float) -> StopReason:
        """Turns until the agent finishes or a budget runs out."""
        if self.services.sandboxes is not None:
            # the container starts while the first turn is generated
            self.sandbox_waiting = asyncio.create_task(self.open_sandbox(self.services.sandboxes))
        for message in self.services.harness.opening(self.task):
            self.agent.hear(message)
        for index in range(self.budget.max_turns):
            if time.monotonic() >= deadline:
                return StopReason.wall_clock
            self.boundary = "generation"
            asked = time.monotonic()
            speech = await self.agent.speak(deadline)
            generate_s = time.monotonic() - asked
            turn = Turn(
                index=index,
                context_id=speech.context_id,
                action=speech.content,
                finish_reason=speech.finish_reason,
                num_input_tokens=speech.num_input_tokens,
                num_sampled_tokens=speech.num_sampled_tokens,
                generate_s=generate_s,
            )
            if speech.num_sampled_tokens or speech.finish_reason == "stop":
                self.turns.append(turn)
            self.add_time("generate_s", generate_s)
            if speech.finish_reason != "stop":
                return StopReason(speech.finish_reason)
            self.boundary = "harness"
            action = self.services.harness.parse(speech.content)
            if isinstance(action, Finish):
                return StopReason.exit
            result = await self.execute(action.command, deadline)
            if result is None:
                return StopReason.wall_clock
            self.boundary = "harness"
            message = self.services.harness.observe(result)
            self.turns[-1] = Turn(
                **{
                    **vars(turn),
                    "observation": message.content,
                    "exit_code": result.exit_code,
                    "timed_out": result.timed_out,
                    "execute_s": result.duration_s,
                }
            )
            self.agent.hear(message)
        return StopReason.max_turns

    async def execute(self, command: str, deadline: float) -> ExecResult | None:
        """Runs one command, or None when no time is left for it.

        Raises:
            EnvCrashError: the sandbox died under the command.
        """
        self.boundary = "harness" if self.sandbox_waiting is None else "sandbox"
        sandbox = await self.sandbox()
        limit = min(self.budget.command_timeout_s, deadline - time.monotonic())
        if limit <= 0:
            return None
        asked = time.monotonic()
        try:
            return await self.services.in_thread(
                f"sandbox {sandbox.id}", limit + GRACE_S, sandbox.run, command, timeout_s=limit
            )
        except SandboxCrashed as failure:
            raise EnvCrashError(f"the sandbox died under {command[:200]!r} ({failure})") from failure
        finally:
            self.add_time("execute_s", time.monotonic() - asked)

    async def grade(self) -> Verdict | None:
        """The verifier's word on the declared artifacts, where there is one; the agent's sandbox is given up first."""
        if self.services.verifier is None:
            return None
        self.boundary = "sandbox"
        sandbox = None if self.sandbox_waiting is None else await self.sandbox()
        asked = time.monotonic()
        self.boundary = "verifier"
        try:
            if sandbox is None:
                artifacts = completion_artifacts(self.turns[-1].action if self.turns else "")
            else:
                artifacts = await self.artifacts_of(sandbox)
                self.close_sandbox(sandbox)
            return await self.services.in_thread(
                f"verifier of task {self.task.id}",
                GRADE_DEADLINE_S,
                self.services.verifier.verify,
                self.task,
                artifacts,
                run_id=self.services.run_id,
                attempt_id=self.attempt_id,
            )
        finally:
            self.add_time("grade_s", time.monotonic() - asked)

    async def artifacts_of(self, sandbox: Sandbox) -> Artifacts:
        """Raises:
        EnvCrashError: the sandbox died after a command of the agent.
        """
        try:
            return await self.services.in_thread(
                f"artifacts of sandbox {sandbox.id}",
                SANDBOX_DEADLINE_S,
                sandbox.get_artifacts,
                self.task.config.artifacts,
            )
        except SandboxCrashed as failure:
            if not self.times.get("execute_s"):
                raise
            raise EnvCrashError(f"the sandbox died after the last command ({failure})") from failure

    async def open_sandbox(self, sandboxes: SandboxFactory) -> Sandbox:
        asked = time.monotonic()
        sandbox = await self.services.in_thread(
            f"start of the sandbox of {self.attempt_id}",
            SANDBOX_DEADLINE_S,
            sandboxes.create,
            self.task,
            role="agent",
            run_id=self.services.run_id,
            attempt_id=self.attempt_id,
        )
        self.add_time("sandbox_start_s", time.monotonic() - asked)
        return sandbox

    async def sandbox(self) -> Sandbox:
        if self.sandbox_waiting is None:
            raise HarnessError("the harness asks for a command, but says needs_sandbox = False")
        # shielded: a cancelled episode still has to close the container that is being made
        return await asyncio.shield(self.sandbox_waiting)

    def close_sandbox(self, sandbox: Sandbox) -> None:
        closing = asyncio.create_task(self._close(sandbox))
        self.closing.add(closing)

    async def _close(self, sandbox: Sandbox) -> None:
        try:
            await self.services.in_thread(f"removal of sandbox {sandbox.id}", SANDBOX_DEADLINE_S, sandbox.close)
        except (SandboxError, OSError) as failure:
            # the reaper finds it by its labels
            logger.warning("Attempt %s: sandbox %s not removed: %s", self.attempt_id, sandbox.id, failure)

    async def clean_up(self) -> None:
        """No open lease is left, in every path."""
        with contextlib.suppress(GenerationError):
            await uninterrupted(self.agent.release())
        if self.sandbox_waiting is not None:
            try:
                sandbox = await uninterrupted(self.sandbox_waiting)
            except (SandboxError, OSError, RuntimeError) as failure:
                logger.debug("Attempt %s never had a sandbox: %s", self.attempt_id, failure)
            else:
                if not self.closing:
                    self.close_sandbox(sandbox)
        for closing in self.closing:
            await uninterrupted(closing)

    def classify(self, failure: Exception) -> tuple[Outcome, StopReason]:
        """Outcome and reason of what broke: by its class, else by the boundary that was being crossed."""
        if isinstance(failure, SandboxError) or self.boundary == "sandbox":
            return Outcome.infra_failed, StopReason.sandbox_error
        if isinstance(failure, VerifierError) or self.boundary == "verifier":
            return Outcome.verifier_failed, StopReason.verifier_error
        if isinstance(failure, HarnessError) or self.boundary == "harness":
            return Outcome.infra_failed, StopReason.harness_error
        return Outcome.infra_failed, StopReason.generation_error

    def add_time(self, name: str, seconds: float) -> None:
        self.times[name] = self.times.get(name, 0.0) + seconds


def describe(failure: BaseException) -> str:
    """Class and message on one line, bounded: it goes into the ledger."""
    return f"{type(failure).__name__}: {failure}"[:2000]


async def uninterrupted(awaitable: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    """Awaits to the end even when the waiter is cancelled meanwhile: clean-up must not be left half done."""
    task = asyncio.ensure_future(awaitable)
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise SandboxError("cancelled while cleaning up") from None
