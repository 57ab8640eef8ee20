"""The run's Ray actors and the calls between them: one trainer, generators, episode workers.

Every call has a deadline that names its holder, and is idempotent by its request or attempt id. Nothing is restarted
behind the run's back: an actor that dies ends the run with its name, and `burnish rl resume=RUN` goes on. Each actor
imports its heavy parts in its own process; the driver stays light.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from burnish.envs.sandbox.base import open_sandboxes
from burnish.envs.taskset import load_taskset
from burnish.rollout.batch import StepResult, TrainItem
from burnish.rollout.config import ClusterConfig
from burnish.rollout.episode import GRACE_S, GRADE_DEADLINE_S, SANDBOX_DEADLINE_S
from burnish.rollout.generator import GenerateRequest, open_engine
from burnish.rollout.settings import EpisodeSettings, TrainerSettings
from burnish.rollout.types import GenerationError, RolloutError, Slot, Trajectory
from burnish.rollout.weight_sync import Receipt, WeightManifest
from burnish.rollout.worker import EpisodeRunner

if TYPE_CHECKING:
    from burnish.policy.inference.config import EngineConfig
    from burnish.policy.inference.sequence import Generation

logger = logging.getLogger(__name__)

# seconds beyond a request's own deadline before its generator counts as dead
ANSWER_GRACE_S = 90.0


class ActorLost(RolloutError):
    """An actor died or did not answer in time; it is named."""


class Actors(Protocol):
    """What the loop asks of the other processes, wherever they are."""

    async def play(self, slot: Slot, attempt_id: str, policy_version: int) -> Trajectory: ...
    async def cancel(self, attempt_ids: list[str]) -> None: ...
    async def train(self, request_id: str, items: Sequence[TrainItem]) -> StepResult: ...
    async def mismatch(self, items: Sequence[TrainItem]) -> dict[str, float]: ...
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


class TrainerActor:
    """A Trainer in a process of its own."""

    def __init__(self, settings: TrainerSettings, threads: int) -> None:
        self._settings, self._threads = settings, threads

    def open(self) -> int:
        """Loads the policy and the newest training state; returns its version."""
        import torch

        from burnish.rollout.trainer import Trainer

        name_process("trainer")
        torch.set_num_threads(self._threads)
        self._trainer = Trainer(self._settings)
        return self._trainer.load()

    def train(self, request_id: str, items: Sequence[TrainItem]) -> StepResult:
        return self._trainer.train(request_id, items)

    def mismatch(self, items: Sequence[TrainItem]) -> dict[str, float]:
        return self._trainer.mismatch(items)

    def save(self) -> str:
        return self._trainer.save()

    def publish(self) -> WeightManifest:
        return self._trainer.publish()

    def export(self, folder: str, parents: dict[str, str]) -> str:
        return self._trainer.export(folder, parents)


class WorkerActor:
    """An EpisodeRunner in a process of its own, whose engine is the run's generators."""

    def __init__(self, name: str, settings: EpisodeSettings, generators: dict[str, Any]) -> None:
        self.name, self._settings, self._generators = name, settings, generators

    async def open(self) -> str:
        """Loads the tasks and reaches the sandboxes; returns their kind."""
        name_process(self.name)
        tasks = {task.id: task for task in load_taskset(Path(self._settings.tasks)).tasks}
        sandboxes = open_sandboxes(self._settings.limits, self._settings.sandbox)
        self._runner = EpisodeRunner(self._settings, tasks, sandboxes, RemoteEngines(self._generators))
        return str(sandboxes.kind)

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
    """The generators as a worker sees them; a context stays with the generator that holds it."""

    def __init__(self, generators: dict[str, Any]) -> None:
        self._generators = generators
        self._home: dict[str, str] = {}

    async def generate(self, request: GenerateRequest) -> "Generation":
        """Raises:
        GenerationError: the generator died, or did not answer in time; it is named.
        """
        name = self._home.setdefault(request.context_id, self._least_loaded())
        try:
            return await ask(name, self._generators[name].generate.remote(request), request.deadline_s + ANSWER_GRACE_S)
        except ActorLost as error:
            raise GenerationError(str(error)) from error

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


async def ask(name: str, call: Any, deadline_s: float) -> Any:
    """The answer of an actor to a call already sent.

    Raises:
        ActorLost: it died, or did not answer in time.
        RolloutError, ValueError, OSError: what the actor itself raised; anything else comes as ActorLost with its words.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        return await asyncio.wait_for(call, deadline_s)
    except TimeoutError as error:
        raise ActorLost(f"{name} did not answer within {deadline_s:.0f} s") from error
    except RayTaskError as error:
        if isinstance(error.cause, RolloutError | ValueError | OSError):
            raise error.cause from error
        raise ActorLost(f"{name} failed: {type(error.cause).__name__}: {error.cause}") from error
    except RayError as error:
        # the first line says it; the rest is Ray's advice
        raise ActorLost(f"{name} is gone: {type(error).__name__}: {str(error).splitlines()[0]}") from error


class RayActors:
    """All actors of a run on the Ray cluster that is up; see `Actors`."""

    def __init__(
        self, cluster: ClusterConfig, trainer: TrainerSettings, episodes: EpisodeSettings, engine: "EngineConfig"
    ) -> None:
        import ray

        def spawn(actor: type, num_cpus: float, *args: Any) -> Any:
            # no restarts and no retries: a lost actor is told, never papered over
            options = {"num_cpus": num_cpus, "max_restarts": 0, "max_task_retries": 0}
            return ray.remote(actor).options(**options).remote(*args)

        self._config = cluster
        threads = cluster.threads_per_actor
        self._trainer = spawn(TrainerActor, cluster.cpus_per_trainer, trainer, threads)
        self._generators = {
            name: spawn(GeneratorActor, cluster.cpus_per_generator, name, trainer.policy, engine, threads)
            for name in (f"generator-{i}" for i in range(cluster.num_generators))
        }
        self._workers = {
            name: spawn(WorkerActor, cluster.cpus_per_worker, name, episodes, self._generators)
            for name in (f"worker-{i}" for i in range(cluster.num_workers))
        }
        self._running = dict.fromkeys(self._workers, 0)
        # the episode's own deadlines, one after the other, and a margin
        self._play_deadline_s = episodes.episode.wall_clock_s + 2 * SANDBOX_DEADLINE_S + GRADE_DEADLINE_S + GRACE_S

    async def open(self) -> int:
        """Waits until every actor is up; returns the version of the training state that was loaded."""
        began = time.monotonic()
        everyone = {"trainer": self._trainer, **self._generators, **self._workers}
        answers = await asyncio.gather(
            *(ask(name, actor.open.remote(), self._config.start_deadline_s) for name, actor in everyone.items())
        )
        kinds = sorted(set(answers[-len(self._workers) :]))
        logger.info(
            "%d actors are up in %.1f s; sandboxes: %s", len(everyone), time.monotonic() - began, ", ".join(kinds)
        )
        return answers[0]

    async def play(self, slot: Slot, attempt_id: str, policy_version: int) -> Trajectory:
        name = min(self._running, key=lambda worker: (self._running[worker], worker))
        self._running[name] += 1
        try:
            call = self._workers[name].play.remote(slot, attempt_id, policy_version)
            return await ask(name, call, self._play_deadline_s)
        finally:
            self._running[name] -= 1

    async def cancel(self, attempt_ids: list[str]) -> None:
        await asyncio.gather(*(self._ask(name, "cancel", attempt_ids) for name in self._workers))

    async def train(self, request_id: str, items: Sequence[TrainItem]) -> StepResult:
        return await self._ask("trainer", "train", request_id, items)

    async def mismatch(self, items: Sequence[TrainItem]) -> dict[str, float]:
        return await self._ask("trainer", "mismatch", items)

    async def save(self) -> str:
        return await self._ask("trainer", "save")

    async def publish(self) -> WeightManifest:
        return await self._ask("trainer", "publish")

    async def export(self, folder: str, parents: dict[str, str]) -> str:
        """Writes a policy folder with the trainer's weights."""
        return await self._ask("trainer", "export", folder, parents)

    async def swap(self, manifest: WeightManifest) -> list[Receipt]:
        return list(await asyncio.gather(*(self._ask(name, "update_weights", manifest) for name in self._generators)))

    async def stats(self) -> dict[str, dict[str, Any]]:
        """Counters of every generator."""
        return {name: await self._ask(name, "stats") for name in self._generators}

    async def close(self) -> None:
        """Cancels what runs and removes every sandbox."""
        await asyncio.gather(*(self._ask(name, "close") for name in self._workers), return_exceptions=True)

    async def _ask(self, name: str, method: str, *args: Any) -> Any:
        actor = {"trainer": self._trainer, **self._generators, **self._workers}[name]
        return await ask(f"{name} ({method})", getattr(actor, method).remote(*args), self._config.call_deadline_s)
