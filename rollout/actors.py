"""What the run's Ray actors do: a trainer, generators, episode workers; and how one asks another.

Every call has a deadline that names its holder, and is idempotent by its request or attempt id. Each actor imports its
heavy parts in its own process; the driver stays light. Who makes actors, and makes them again, is ray_actors.py.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from burnish.envs.taskset import load_taskset
from burnish.rollout.batch import RolloutItem, StepResult
from burnish.rollout.generator import GenerateRequest, open_engine
from burnish.rollout.settings import EpisodeSettings, PolicyTrainerSettings
from burnish.rollout.sources import NO_SANDBOX, load_tasks, open_machines
from burnish.rollout.types import ActorGone, ActorLost, GenerationError, RolloutError, Slot, Trajectory
from burnish.rollout.weight_sync import Receipt, WeightManifest
from burnish.rollout.worker import EpisodeRunner

if TYPE_CHECKING:
    from burnish.policy.inference.config import EngineConfig
    from burnish.policy.inference.sequence import Generation

logger = logging.getLogger(__name__)

# seconds beyond a request's own deadline before its generator counts as dead
ANSWER_GRACE_S = 90.0
# seconds within which a dead generator is replaced, or its requests fail
REPLACE_S = 240.0


class Actors(Protocol):
    """What the loop asks of the other processes, wherever they are."""

    async def play(self, slot: Slot, attempt_id: str, policy_version: int) -> Trajectory: ...
    async def cancel(self, attempt_ids: list[str]) -> None: ...
    async def train(self, request_id: str, items: Sequence[RolloutItem]) -> StepResult: ...
    async def mismatch(self, items: Sequence[RolloutItem]) -> dict[str, float]: ...
    async def save(self) -> str: ...
    async def publish(self) -> WeightManifest: ...
    async def swap(self, manifest: WeightManifest) -> list[Receipt]: ...


class GeneratorActor:
    """An EngineLoop in a process of its own. All methods are asynchronous, so requests overlap."""

    def __init__(self, name: str, policy: str, config: "EngineConfig", threads: int) -> None:
        self.name, self._policy, self._config, self._threads = name, policy, config, threads

    async def open(self) -> int:
        """Loads the policy; returns its version. Not in the constructor, so that a user's mistake comes back as itself."""
        import torch

        name_process(self.name)
        torch.set_num_threads(self._threads)
        self._loop = open_engine(Path(self._policy), self._config, self.name)
        return self._loop.policy_version

    async def generate(self, request: GenerateRequest) -> "Generation":
        generation = await self._loop.generate(request)
        # a tensor of this dtype does not survive the way between processes, an array does
        routes = None if generation.routes is None else np.asarray(generation.routes)
        return replace(generation, routes=routes)

    async def release(self, context_id: str) -> None:
        await self._loop.release(context_id)

    async def update_weights(self, manifest: WeightManifest) -> Receipt:
        return await self._loop.update_weights(manifest)

    async def stats(self) -> dict[str, Any]:
        return await self._loop.stats()

    async def live(self) -> None:
        """Never answers: whoever waits learns at once when this process ends."""
        await asyncio.Event().wait()


class TrainerActor:
    """A trainer in a process of its own."""

    def __init__(self, settings: PolicyTrainerSettings, threads: int) -> None:
        self._settings, self._threads = settings, threads

    def open(self) -> int:
        """Loads the policy and the newest training state; returns its version."""
        import torch

        name_process("trainer")
        torch.set_num_threads(self._threads)
        self._trainer = self._settings.build()
        return self._trainer.load()

    def train(self, request_id: str, items: Sequence[RolloutItem]) -> StepResult:
        return self._trainer.train(request_id, items)

    def mismatch(self, items: Sequence[RolloutItem]) -> dict[str, float]:
        return self._trainer.mismatch(items)

    def forget(self, since: int) -> None:
        self._trainer.forget(since)

    def save(self) -> str:
        return self._trainer.save()

    def publish(self) -> WeightManifest:
        return self._trainer.publish()

    def export(self, folder: str, parents: dict[str, str]) -> str:
        return self._trainer.export(folder, parents)


class WorkerActor:
    """An EpisodeRunner in a process of its own, whose engine is the run's generators."""

    def __init__(self, name: str, settings: EpisodeSettings, generators: dict[str, Any]) -> None:
        self.name, self._settings = name, settings
        self._engines = RemoteEngines(generators)

    async def open(self) -> str:
        """Loads the tasks and reaches the sandboxes; returns their kind."""
        name_process(self.name)
        tasks = {task.id: task for task in load_tasks(self._settings).tasks}
        for folder in self._settings.further_tasks:
            tasks |= {task.id: task for task in load_taskset(Path(folder)).tasks}
        sandboxes = open_machines(self._settings)
        self._runner = EpisodeRunner(self._settings, tasks, sandboxes, self._engines)
        return NO_SANDBOX if sandboxes is None else str(sandboxes.kind)

    async def replace_generator(self, name: str, generator: Any) -> None:
        """From now on `name` is another process; requests that the old one owes are asked again of it."""
        self._engines.replace(name, generator)

    async def play(self, slot: Slot, attempt_id: str, policy_version: int) -> Trajectory:
        return await self._runner.play(slot, attempt_id, policy_version)

    async def cancel(self, attempt_ids: list[str]) -> None:
        await self._runner.cancel(attempt_ids)

    async def close(self) -> None:
        await self._runner.close()


def name_process(name: str) -> None:
    """Each actor names itself once, in every line it logs."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s", force=True)


class RemoteEngines:
    """The generators as a worker sees them; a context stays with the generator that holds it.

    When a generator dies its requests wait for the one that takes its place and are asked again of it: a request carries
    the whole context, so the new process samples the same turn from a cold prefill, and the episode goes on.
    """

    def __init__(self, generators: dict[str, Any]) -> None:
        self._generators = dict(generators)
        self._home: dict[str, str] = {}
        self._replaced = asyncio.Condition()

    async def generate(self, request: GenerateRequest) -> "Generation":
        """Raises:
        GenerationError: the generator did not answer in time, or nothing took the place of a dead one; it is named.
        """
        name = self._home.setdefault(request.context_id, self._least_loaded())
        while True:
            generator = self._generators[name]
            try:
                return await ask(name, generator.generate.remote(request), request.deadline_s + ANSWER_GRACE_S)
            except ActorGone as error:
                if not await self._another_than(name, generator):
                    raise GenerationError(f"{error}, and nothing took its place in {REPLACE_S:.0f} s") from error
            except ActorLost as error:
                raise GenerationError(str(error)) from error

    def replace(self, name: str, generator: Any) -> None:
        """`name` is another process from now on."""
        self._generators[name] = generator
        # a replacement is told from the event loop that the waiting requests run on
        self._wake = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._replaced:
            self._replaced.notify_all()

    async def _another_than(self, name: str, lost: Any) -> bool:
        async def wait() -> None:
            async with self._replaced:
                await self._replaced.wait_for(lambda: self._generators[name] is not lost)

        try:
            await asyncio.wait_for(wait(), REPLACE_S)
        except TimeoutError:
            return False
        return True

    async def release(self, context_id: str) -> None:
        name = self._home.pop(context_id, None)
        if name is not None:
            # nobody waits for it: a generator that died has released everything
            self._generators[name].release.remote(context_id)

    def _least_loaded(self) -> str:
        held = dict.fromkeys(self._generators, 0)
        for name in self._home.values():
            held[name] += 1
        return min(held, key=lambda name: (held[name], name))


async def ask(name: str, call: Any, deadline_s: float | None, method: str = "") -> Any:
    """The answer of actor `name` to a call already sent.

    Raises:
        ActorGone: its process died.
        ActorLost: it did not answer in time.
        RolloutError, ValueError, OSError: what the actor itself raised; anything else comes as ActorLost with its words.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        return await asyncio.wait_for(call, deadline_s)
    except TimeoutError as error:
        what = f" to {method}" if method else ""
        raise ActorLost(f"{name} did not answer{what} within {deadline_s:.0f} s") from error
    except RayTaskError as error:
        if isinstance(error.cause, RolloutError | ValueError | OSError):
            raise error.cause from error
        raise ActorLost(f"{name} failed: {type(error.cause).__name__}: {error.cause}") from error
    except RayError as error:
        # the first line says it; the rest is Ray's advice
        raise ActorGone(name, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
