"""EpisodeRunner: many episodes at a time in one process.

It holds what episodes share (tasks, harness, sandboxes, verifier, threads) and knows no Ray: an evaluation runs it beside
an engine in its own process, RL in a worker actor. An attempt id asked twice is played once.
"""

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from burnish.envs.sandbox.base import SandboxFactory
from burnish.envs.task import Task
from burnish.policy.encoding.conversation import Conversation
from burnish.policy.encoding.tokenizer import Tokenizer, load_tokenizer
from burnish.rollout.agents import Generate, PolicyAgent, ScriptedAgent, nop, oracle, sampling_seed
from burnish.rollout.config import Agent
from burnish.rollout.episode import Services, run_episode
from burnish.rollout.settings import EpisodeSettings
from burnish.rollout.sources import close_verifier, open_harness, open_verifier
from burnish.rollout.token_log import TokenLog
from burnish.rollout.types import Slot, Trajectory

logger = logging.getLogger(__name__)

# ended attempts kept for a call that is repeated after a lost reply
KEPT_TRAJECTORIES = 512


class EpisodeRunner:
    """Plays attempts of one run.

    Args:
        tasks: by id.
        engine: how the policy is reached; None for scripted agents.
        sandboxes: closed with the runner; None for prompts.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        tasks: dict[str, Task],
        sandboxes: SandboxFactory | None,
        engine: Generate | None,
    ) -> None:
        self.settings, self.tasks, self.engine = settings, tasks, engine
        self.policy_version = 0
        """Newest version known to answer."""
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="episode")
        self._sandboxes = sandboxes
        self._services = Services(
            run_id=settings.run_id,
            harness=open_harness(settings),
            sandboxes=sandboxes,
            verifier=open_verifier(settings, sandboxes),
            threads=self._threads,
            policy_version=lambda: self.policy_version,
        )
        self._tokenizer: Tokenizer | None = None
        if settings.agent is Agent.policy:
            self._tokenizer = load_tokenizer(Path(settings.policy), settings.encoding.system_token_id)
        self._attempts: dict[str, asyncio.Task[Trajectory]] = {}

    async def play(self, slot: Slot, attempt_id: str, policy_version: int) -> Trajectory:
        """One attempt to its outcome.

        Args:
            policy_version: version that answers when the attempt is dispatched.
        """
        self.policy_version = max(self.policy_version, policy_version)
        if attempt_id not in self._attempts:
            self._forget_oldest()
            self._attempts[attempt_id] = asyncio.create_task(self._play(slot, attempt_id))
        return await asyncio.shield(self._attempts[attempt_id])

    def _forget_oldest(self) -> None:
        """Bounds what is kept for attempts that are asked again."""
        ended = [attempt_id for attempt_id, task in self._attempts.items() if task.done()]
        for attempt_id in ended[: max(0, len(ended) - KEPT_TRAJECTORIES)]:
            del self._attempts[attempt_id]

    async def cancel(self, attempt_ids: Iterable[str]) -> None:
        """Ends attempts; whoever waits for them gets the outcome `cancelled`."""
        for attempt_id in attempt_ids:
            task = self._attempts.get(attempt_id)
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Cancels what is left, closes every sandbox and ends the verifier's processes."""
        left = [task for task in self._attempts.values() if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._sandboxes is not None:
            await asyncio.to_thread(self._sandboxes.close)
        await asyncio.to_thread(close_verifier, self._services.verifier)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _play(self, slot: Slot, attempt_id: str) -> Trajectory:
        agent = self._agent(slot, attempt_id)
        trajectory = await run_episode(
            slot, attempt_id, self.tasks[slot.task_id], agent, self._services, self.settings.episode
        )
        if isinstance(agent, PolicyAgent) and agent.newest_version >= 0:
            self.policy_version = max(self.policy_version, agent.newest_version)
            trajectory = replace(trajectory, version_end=agent.newest_version)
        return trajectory

    def _agent(self, slot: Slot, attempt_id: str) -> PolicyAgent | ScriptedAgent:
        settings = self.settings
        if settings.agent is Agent.oracle:
            return oracle(self.tasks[slot.task_id], self._services.harness)
        if settings.agent is Agent.nop:
            return nop(self._services.harness)
        assert self.engine is not None
        assert self._tokenizer is not None
        return PolicyAgent(
            attempt_id=attempt_id,
            conversation=Conversation(self._tokenizer, settings.encoding),
            engine=self.engine,
            log=TokenLog(Path(settings.blocks), attempt_id),
            sampling=settings.sampling,
            budget=settings.episode,
            seed=sampling_seed(settings.seed, slot.slot_id),
            eos=self._tokenizer.special.eos,
        )
