"""Makes a run's Ray actors, calls them, and makes those that die again.

A worker or a generator that dies is replaced in place: a worker's episodes are played again by the slots they belong to,
its sandboxes are removed; a generator's requests are asked again of its successor, which first takes the newest weights.
A trainer that dies takes optimizer state with it: its caller is told (ActorGone), asks for `revive_trainer`, and goes on
from the newest checkpoint, as after a restart of the driver. Ray itself restarts and retries nothing.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from burnish.envs.sandbox.reap import reap_attempts
from burnish.rollout.actors import GeneratorActor, TrainerActor, WorkerActor, ask
from burnish.rollout.batch import RolloutItem, StepResult
from burnish.rollout.config import ClusterConfig
from burnish.rollout.episode import GRACE_S, GRADE_DEADLINE_S, SANDBOX_DEADLINE_S
from burnish.rollout.settings import EpisodeSettings, PolicyTrainerSettings
from burnish.rollout.types import ActorGone, ActorLost, Slot, Trajectory
from burnish.rollout.weight_sync import Receipt, WeightManifest, check_receipt

if TYPE_CHECKING:
    from burnish.policy.inference.config import EngineConfig

logger = logging.getLogger(__name__)


class RayActors:
    """All actors of a run on the Ray cluster that is up; see `Actors`."""

    def __init__(
        self, cluster: ClusterConfig, trainer: PolicyTrainerSettings, episodes: EpisodeSettings, engine: "EngineConfig"
    ) -> None:
        self._config, self._trainer, self._episodes, self._engine = cluster, trainer, episodes, engine
        self._generators = [f"generator-{i}" for i in range(cluster.num_generators)]
        self._workers = [f"worker-{i}" for i in range(cluster.num_workers)]
        self._handles: dict[str, Any] = {}
        self._locks = {name: asyncio.Lock() for name in ("trainer", *self._generators, *self._workers)}
        self._deaths: Counter[str] = Counter()
        self._attempts: dict[str, set[str]] = {name: set() for name in self._workers}
        """Attempts that each worker plays."""
        self._manifest: WeightManifest | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        # the episode's own deadlines, one after the other, and a margin
        self._play_deadline_s = episodes.episode.wall_clock_s + 2 * SANDBOX_DEADLINE_S + GRADE_DEADLINE_S + GRACE_S

    async def open(self) -> int:
        """Makes every actor and waits until all are up; returns the version of the training state that was loaded."""
        began = time.monotonic()
        for name in ("trainer", *self._generators, *self._workers):
            self._handles[name] = self._spawn(name)
        answers = await asyncio.gather(*(self._up(name) for name in self._handles))
        for name in self._generators:
            if self._deaths[name]:
                # the workers were made with the one that died
                await self._introduce(name)
            else:
                self._watch(name)
        kinds = sorted(set(answers[-len(self._workers) :]))
        logger.info(
            "%d actors are up in %.1f s; sandboxes: %s", len(answers), time.monotonic() - began, ", ".join(kinds)
        )
        return answers[0]

    async def revive_trainer(self) -> int:
        """Another trainer, from the newest checkpoint; returns its version.

        Raises:
            ActorLost: it does not come up, or has died too often.
        """
        return await self._replace("trainer", self._handles["trainer"])

    async def roll_back(self, since: int) -> int:
        """Another trainer, from the newest checkpoint before version `since` (0: the start policy); returns its version."""
        import ray

        await self._ask("trainer", "forget", since)
        async with self._locks["trainer"]:
            ray.kill(self._handles["trainer"])
            self._handles["trainer"] = self._spawn("trainer")
            return await self._up("trainer")

    async def play(self, slot: Slot, attempt_id: str, policy_version: int) -> Trajectory:
        """One attempt on the worker with the fewest.

        Raises:
            ActorGone: the worker died; another one has taken its place, and nothing of the attempt is left.
        """
        self._raise_failures()
        name = min(self._attempts, key=lambda worker: (len(self._attempts[worker]), worker))
        worker = self._handles[name]
        self._attempts[name].add(attempt_id)
        try:
            return await ask(name, worker.play.remote(slot, attempt_id, policy_version), self._play_deadline_s)
        except ActorGone:
            await self._replace(name, worker)
            raise
        finally:
            self._attempts[name].discard(attempt_id)

    async def cancel(self, attempt_ids: list[str]) -> None:
        """Ends attempts; those of a worker that is gone have ended with it."""
        for name in self._workers:
            with contextlib.suppress(ActorGone):
                await self._ask(name, "cancel", attempt_ids)

    async def train(self, request_id: str, items: Sequence[RolloutItem]) -> StepResult:
        return await self._ask("trainer", "train", request_id, items)

    async def mismatch(self, items: Sequence[RolloutItem]) -> dict[str, float]:
        return await self._ask("trainer", "mismatch", items)

    async def save(self) -> str:
        return await self._ask("trainer", "save")

    async def publish(self) -> WeightManifest:
        return await self._ask("trainer", "publish")

    async def export(self, folder: str, parents: dict[str, str]) -> str:
        """Writes a policy folder with the trainer's weights."""
        return await self._ask("trainer", "export", folder, parents)

    async def swap(self, manifest: WeightManifest) -> list[Receipt]:
        """The published weights into every generator, also into one that takes another's place from now on."""
        self._manifest = manifest
        return list(
            await asyncio.gather(*(self._insist(name, "update_weights", manifest) for name in self._generators))
        )

    async def stats(self) -> dict[str, dict[str, Any]]:
        """Counters of every generator; one that took another's place has counted from there on."""
        return {name: await self._insist(name, "stats") for name in self._generators}

    async def close(self) -> None:
        """Cancels what runs and removes every sandbox."""
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(
            *(self._ask(name, "close") for name in self._workers if name in self._handles), return_exceptions=True
        )

    def _raise_failures(self) -> None:
        """Raises:
        ActorLost: a generator could not be replaced.
        """
        for watch in self._watches.values():
            if watch.done() and not watch.cancelled():
                watch.result()

    # -- one actor

    def _spawn(self, name: str) -> Any:
        import ray

        cluster, threads = self._config, self._config.threads_per_actor

        def make(actor: type, num_cpus: float, *args: Any) -> Any:
            options = {"num_cpus": num_cpus, "max_restarts": 0, "max_task_retries": 0}
            return ray.remote(actor).options(**options).remote(*args)

        if name == "trainer":
            return make(TrainerActor, cluster.cpus_per_trainer, self._trainer, threads)
        if name in self._generators:
            arguments = (name, self._trainer.policy, self._engine, threads)
            return make(GeneratorActor, cluster.cpus_per_generator, *arguments)
        generators = {name: self._handles[name] for name in self._generators}
        return make(WorkerActor, cluster.cpus_per_worker, name, self._episodes, generators)

    async def _up(self, name: str) -> Any:
        """Opens an actor that was just made; one that dies while it comes up is made again.

        Raises:
            ActorLost: it has died too often, or does not answer in time.
        """
        while True:
            try:
                return await ask(name, self._handles[name].open.remote(), self._config.start_deadline_s, "open")
            except ActorGone:
                self._count_death(name)
                self._handles[name] = self._spawn(name)

    def _count_death(self, name: str) -> None:
        self._deaths[name] += 1
        limit = self._config.max_restarts
        if self._deaths[name] > limit:
            raise ActorLost(f"{name} has died {self._deaths[name]} times; cluster.max_restarts is {limit}")
        logger.warning("%s is gone; another one takes its place (%d)", name, self._deaths[name])

    async def _ask(self, name: str, method: str, *args: Any) -> Any:
        call = getattr(self._handles[name], method).remote(*args)
        return await ask(name, call, self._config.call_deadline_s, method)

    async def _insist(self, name: str, method: str, *args: Any) -> Any:
        """Asks whoever is `name`, until one of them lives long enough to answer."""
        while True:
            actor = self._handles[name]
            try:
                return await self._ask(name, method, *args)
            except ActorGone:
                await self._replace(name, actor)

    async def _replace(self, name: str, dead: Any) -> Any:
        """Puts another process in the place of `dead`, once, however many have noticed; returns what `open` answers.

        Raises:
            ActorLost: the actor has died `cluster.max_restarts` times already, or its successor does not come up.
        """
        async with self._locks[name]:
            if self._handles[name] is not dead:
                return None
            self._count_death(name)
            if name in self._workers:
                await self._remove_sandboxes(name)
            self._handles[name] = self._spawn(name)
            answer = await self._up(name)
            if name in self._generators:
                await self._introduce(name)
            return answer

    async def _introduce(self, name: str) -> None:
        """A new generator takes the newest weights before it is asked for a token."""
        if self._manifest is not None:
            check_receipt(await self._ask(name, "update_weights", self._manifest), self._manifest)
        self._watch(name)
        for worker in self._workers:
            # a worker that dies meanwhile is made with the new one
            with contextlib.suppress(ActorGone):
                await self._ask(worker, "replace_generator", name, self._handles[name])

    def _watch(self, name: str) -> None:
        """Requests come from the workers; here the death of a generator is noticed."""
        generator = self._handles[name]

        async def wait() -> None:
            try:
                # no deadline: it answers with its death
                await ask(name, generator.live.remote(), None)
            except ActorGone:
                await self._replace(name, generator)

        self._watches[name] = asyncio.create_task(wait())

    async def _remove_sandboxes(self, worker: str) -> None:
        """What a dead worker cannot remove any more."""
        limits, run_id, attempts = self._episodes.limits, self._episodes.run_id, frozenset(self._attempts[worker])
        removed = await asyncio.to_thread(reap_attempts, limits.engine_url, limits.driver, run_id, attempts)
        logger.info("Removed %d sandboxes of %s", removed, worker)
