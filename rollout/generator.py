"""Generator: one engine behind an asynchronous, idempotent interface.

`EngineLoop` owns the engine: one thread steps it while anything runs, and every other touch (admission, abort, release,
weight swap) is a command that this thread executes between two steps. So a swap always finds a drained step, and
requests never race. A request id asked twice is served once; every request has a deadline, at which it is aborted and
what was sampled so far comes back. Knows no episode and no task.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from burnish.rollout.types import GenerationError
from burnish.rollout.weight_sync import Receipt, WeightManifest, receive, verify

if TYPE_CHECKING:
    import torch

    from burnish.policy.inference.config import EngineConfig
    from burnish.policy.inference.sequence import Generation, SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")

# answers kept for a request that is asked again (a retry after a lost reply)
KEPT_ANSWERS = 4096
# seconds an abort may take: one engine step
ABORT_GRACE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One turn to sample."""

    request_id: str
    """Asked twice, served once."""
    context_id: str
    """A resident context of this id that the ids extend goes on without a prefill of what is there."""
    ids: tuple[int, ...]
    """The whole context so far."""
    sampling: "SamplingParams"
    deadline_s: float
    """Seconds after which the request is aborted; its answer then says `abort` and holds what was sampled."""


class SteppedEngine(Protocol):
    """What the loop needs of an engine; burnish.policy.inference.engine.Engine has it."""

    @property
    def policy_version(self) -> int: ...
    def add_request(
        self, request_id: str, context_id: str, ids: list[int], sampling: "SamplingParams", keep_resident: bool
    ) -> None: ...
    def step(self) -> "list[Generation]": ...
    def abort(self, request_id: str) -> Any: ...
    def release(self, context_id: str) -> None: ...
    def update_weights(self, weights: "dict[str, torch.Tensor]", version: int, mode: str = "recompute") -> None: ...
    def stats(self) -> dict[str, Any]: ...


class EngineLoop:
    """Steps an engine as long as it has requests; safe to call from one asyncio loop.

    Args:
        engine: touched by this loop's thread only, from here on.
        name: who this is in errors and receipts.
        tensors: names and tensors that the engine really computes with, for receipts.
    """

    def __init__(
        self, engine: SteppedEngine, name: str, tensors: "Callable[[], list[tuple[str, torch.Tensor]]] | None" = None
    ) -> None:
        self.name = name
        self._engine, self._tensors = engine, tensors
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{name}")
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._contexts: dict[str, str] = {}
        """Context of each waiting request."""
        self._answers: OrderedDict[str, Generation] = OrderedDict()
        self._stepping: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    async def generate(self, request: GenerateRequest) -> "Generation":
        """Samples one turn.

        Raises:
            GenerationError: the engine refused or failed, or does not even answer an abort.
        """
        if request.request_id in self._answers:
            return self._answers[request.request_id]
        try:
            if request.request_id not in self._waiting:
                await self._add(request)
            return await self._answer(request)
        except asyncio.CancelledError:
            await self.abort(request.request_id)
            raise

    async def _add(self, request: GenerateRequest) -> None:
        self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        self._contexts[request.request_id] = request.context_id
        ids = list(request.ids)
        try:
            await self._command(
                lambda: self._engine.add_request(
                    request.request_id, request.context_id, ids, request.sampling, keep_resident=True
                )
            )
        except ValueError as error:
            self._waiting.pop(request.request_id).cancel()
            self._contexts.pop(request.request_id)
            raise GenerationError(f"generator {self.name} refuses {request.request_id}: {error}") from error

    async def _answer(self, request: GenerateRequest) -> "Generation":
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            return self._answers[request.request_id]
        # shielded: one caller that gives up must not take the answer from another one with the same request id
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(waiting), request.deadline_s)
        await self.abort(request.request_id)
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), ABORT_GRACE_S)
        except TimeoutError as error:
            self._waiting.pop(request.request_id, None)
            self._contexts.pop(request.request_id, None)
            raise GenerationError(
                f"generator {self.name} holds {request.request_id}: no answer {ABORT_GRACE_S:.0f} s after its abort"
            ) from error

    async def abort(self, request_id: str) -> None:
        """Ends a request now; its waiter gets what was sampled. Unknown ids are ignored."""
        if request_id in self._waiting:
            generation = await self._command(lambda: self._engine.abort(request_id))
            if generation is not None:
                self._resolve(generation)

    async def release(self, context_id: str) -> None:
        """Gives up a context; a request that still runs on it is aborted first."""
        for request_id, other in list(self._contexts.items()):
            if other == context_id:
                await self.abort(request_id)
        await self._command(lambda: self._engine.release(context_id))

    async def update_weights(self, manifest: WeightManifest) -> Receipt:
        """Swaps to a published version between two steps; running requests are recomputed and go on.

        The same manifest again is acknowledged again. A failed update leaves the old version.

        Raises:
            WeightSyncError: the published tensors are not what the manifest says, or the engine holds other ones.
        """
        started = time.monotonic()
        if self._engine.policy_version != manifest.version:
            state = await asyncio.to_thread(receive, manifest)
            await self._command(lambda: self._engine.update_weights(state, manifest.version, mode="recompute"))
        digest = await self._command(lambda: self._digest(manifest))
        return Receipt(
            generator=self.name, version=self._engine.policy_version, digest=digest, seconds=time.monotonic() - started
        )

    def _digest(self, manifest: WeightManifest) -> str:
        if self._tensors is None:
            return manifest.digest
        return verify(self._tensors(), manifest, f"generator {self.name} after the swap to version {manifest.version}")

    async def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return await self._command(self._engine.stats)

    def close(self) -> None:
        """Stops the thread; waiting requests fail."""
        self._fail(GenerationError(f"generator {self.name} was closed"))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _command(self, call: Callable[[], T]) -> T:
        if self._failure is not None:
            raise GenerationError(f"generator {self.name} failed: {self._failure}") from self._failure
        done: Future[T] = Future()
        self._commands.append((call, done))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_while_busy())
        # shielded: a command that was given is executed, whoever waits for it
        return await asyncio.shield(asyncio.wrap_future(done))

    async def _step_while_busy(self) -> None:
        loop = asyncio.get_running_loop()
        while self._commands or self._waiting:
            try:
                finished = await loop.run_in_executor(self._thread, self._work)
            except asyncio.CancelledError:
                self._fail(GenerationError("its event loop ends"))
                raise
            except Exception as error:
                logger.exception("Generator %s: the engine failed", self.name)
                self._fail(error)
                return
            for generation in finished:
                self._resolve(generation)

    def _work(self) -> "list[Generation]":
        """In the engine's thread: commands, then steps until something finishes or new commands wait."""
        while self._commands:
            call, done = self._commands.popleft()
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 belongs to whoever gave the command
                done.set_exception(error)
            else:
                done.set_result(result)
        finished: list[Generation] = []
        while self._waiting and not finished and not self._commands:
            finished = self._engine.step()
        return finished

    def _resolve(self, generation: "Generation") -> None:
        self._answers[generation.request_id] = generation
        while len(self._answers) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        waiting = self._waiting.pop(generation.request_id, None)
        self._contexts.pop(generation.request_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(generation)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(GenerationError(f"generator {self.name} failed: {error}"))
        while self._commands:
            _, done = self._commands.popleft()
            done.set_exception(GenerationError(f"generator {self.name} failed: {error}"))


def open_engine(policy: Path, config: "EngineConfig", name: str) -> EngineLoop:
    """An engine that holds the policy of a folder, behind a loop."""
    from burnish.policy.checkpoint.released import load_policy
    from burnish.policy.inference.engine import Engine

    model = load_policy(policy)
    engine = Engine(model, config)
    return EngineLoop(engine, name, tensors=lambda: list(model.state_dict().items()))
