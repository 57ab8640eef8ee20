"""One thread that owns an engine for the HTTP server: requests in, what they sample out as it is sampled.

The engine is touched by this thread only. Everything else is a command that runs between two steps. Rollouts use
rollout/generator.py, which adds versions and deadlines; this one streams. Knows no HTTP and no text.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from burnish.policy.inference.sequence import Event, Generation, SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")


class StreamedEngine(Protocol):
    """What the thread needs of an engine; burnish.policy.inference.engine.Engine has it."""

    def add_request(
        self, request_id: str, context_id: str, ids: list[int], sampling: "SamplingParams", keep_resident: bool
    ) -> None: ...
    def step(self) -> "list[Generation]": ...
    def events(self) -> "list[Event]": ...
    def abort(self, request_id: str) -> "Generation | None": ...
    def release(self, context_id: str) -> None: ...
    def stats(self) -> dict[str, Any]: ...


class EngineStopped(RuntimeError):
    """The engine failed or was shut down: this request gets no answer."""


@dataclass(frozen=True)
class Piece:
    """Tokens sampled since the last piece."""

    ids: list[int]
    lp_raw: list[float]


class EngineStream:
    """What one request samples, piece by piece; after the last piece `generation` holds all of it."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.generation: Generation | None = None
        self._loop = loop
        self._reports: asyncio.Queue[Event | Generation | EngineStopped] = asyncio.Queue()

    def put(self, report: "Event | Generation | EngineStopped") -> None:
        """Called by the engine's thread."""
        # the loop is closed when the server stopped with requests under way: nobody listens any more
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._reports.put_nowait, report)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Until the request is finished or aborted.

        Raises:
            EngineStopped: the engine failed or was shut down.
        """
        num_seen = 0
        while self.generation is None:
            report = await self._reports.get()
            if isinstance(report, EngineStopped):
                raise report
            piece = Piece(report.ids, report.lp_raw)
            if hasattr(report, "prefill_entries"):
                # the whole answer: what no event has told comes from it (after an abort)
                self.generation = cast("Generation", report)
                piece = Piece(report.ids[num_seen:], report.lp_raw[num_seen:])
            num_seen += len(piece.ids)
            if piece.ids:
                yield piece


class EngineThread:
    """Steps the engine while requests are open.

    Args:
        engine: touched by this object's thread only, from here on.
    """

    def __init__(self, engine: StreamedEngine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._streams: dict[str, EngineStream] = {}
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: BaseException | None = None
        """What the engine died of."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after the step under way; open requests fail."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join(timeout_s)

    async def open(
        self, request_id: str, context_id: str, ids: list[int], sampling: "SamplingParams", keep_resident: bool
    ) -> EngineStream:
        """Admit a request.

        Raises:
            ValueError: the engine refuses it.
            EngineStopped: the engine failed or was shut down.
        """
        stream = EngineStream(request_id, asyncio.get_running_loop())

        def admit() -> None:
            self._engine.add_request(request_id, context_id, ids, sampling, keep_resident)
            self._streams[request_id] = stream

        await self._call(admit)
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request now; its stream ends with what was sampled. Finished and unknown ones are ignored."""

        def abort() -> None:
            if request_id in self._streams:
                generation = self._engine.abort(request_id)
                # an engine that answers aborts in its next step returns None here
                if generation is not None:
                    self._streams.pop(request_id).put(generation)

        await self._call(abort)

    async def release(self, context_id: str) -> None:
        """Give up a resident context."""
        await self._call(lambda: self._engine.release(context_id))

    async def stats(self) -> dict[str, Any]:
        return await self._call(self._engine.stats)

    async def _call(self, call: Callable[[], T]) -> T:
        done: Future[T] = Future()
        with self._closing:
            if self._is_closed:
                raise EngineStopped(f"the engine stopped: {self.failure or 'the server is shutting down'}")
            self._commands.put((call, done))
        return await asyncio.wrap_future(done)

    # --- in the thread

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except Exception as error:
            logger.exception("The engine failed")
            self.failure = error
        self._drain(EngineStopped(f"the engine stopped: {self.failure or 'the server is shutting down'}"))

    def _work(self) -> bool:
        """Commands that wait, then one step; sleeps when there is nothing to step. False: stop."""
        while not self._commands.empty() or not self._streams:
            command = self._commands.get()
            if command is None:
                return False
            call, done = command
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001 belongs to whoever gave the command
                done.set_exception(error)
        finished = self._engine.step()
        for event in self._engine.events():
            if event.request_id in self._streams:
                self._streams[event.request_id].put(event)
        for generation in finished:
            stream = self._streams.pop(generation.request_id, None)
            if stream is not None:
                stream.put(generation)
        return True

    def _drain(self, reason: EngineStopped) -> None:
        for stream in self._streams.values():
            stream.put(reason)
        self._streams.clear()
        # from here on nobody reads commands: the last ones are answered, later ones refused
        with self._closing:
            self._is_closed = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(reason)
