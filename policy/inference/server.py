"""`burnish serve`: an OpenAI chat and completions endpoint over one engine. Entry point; FastAPI is imported where it runs.

Routes: GET /health, /metrics, /v1/models; POST /v1/chat/completions, /v1/completions. HTTP only: what a request means is
openai_request.py, what it becomes backend.py, how it is answered openai_response.py.
"""

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from burnish.policy.encoding.render import read_tools_template
from burnish.policy.encoding.tokenizer import check_fits
from burnish.policy.inference.backend import Backend, Batch, Job
from burnish.policy.inference.config import ServeRun
from burnish.policy.inference.engine_thread import EngineStopped, EngineThread, Piece
from burnish.policy.inference.openai_request import ApiError, parse_chat, parse_completion
from burnish.policy.inference.openai_response import ChatChoice, TextChoice, sse
from burnish.policy.inference.openai_stream import ChatStream, TextStream

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

logger = logging.getLogger(__name__)
T = TypeVar("T")

# how often a waiting answer looks whether its client is still there
GONE_POLL_S = 0.2
# a comment line keeps proxies from closing a silent stream
PING_S = 15.0
SHUTDOWN_S = 5
# the event loop holds tasks weakly
_CLOSING: set[asyncio.Task[None]] = set()


class ClientGone(Exception):
    """The client closed the connection: nobody reads the answer."""


async def while_connected(request: "Request", waiting: Awaitable[T]) -> T:
    """Wait for something as long as the client is there.

    Raises:
        ClientGone: it left; what was waited for is cancelled.
    """
    task = asyncio.ensure_future(waiting)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=GONE_POLL_S)
            if done:
                return task.result()
            if await request.is_disconnected():
                raise ClientGone
    finally:
        task.cancel()


async def read_json(request: "Request", max_bytes: int) -> Mapping[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 413 too large, 400 not an object.
        ClientGone: it left before the body was whole.
    """
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise ApiError(413, f"The request body is larger than {max_bytes} bytes", code="request_too_large")
    except ClientDisconnect:
        raise ClientGone from None
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The request body is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"The request body must be a JSON object, got {type(raw).__name__}")
    return raw


async def event_stream(
    request: "Request", backend: Backend, batch: Batch[Any], stream: ChatStream | TextStream, end_think: int | None,
    at_end: Callable[[], None],
) -> AsyncGenerator[str, None]:  # fmt: skip
    """Server-sent events of an opened batch; closes it, whatever happens, once the first item (empty) was taken."""
    chunks = backend.sample(batch, stream.feed, stream.finish)
    pending: asyncio.Future[dict[str, Any]] | None = None
    try:
        yield ""
        if isinstance(stream, ChatStream):
            for chunk in stream.start():
                yield sse(chunk)
        last_sent = time.monotonic()
        while True:
            pending = pending or asyncio.ensure_future(anext(chunks))
            done, _ = await asyncio.wait({pending}, timeout=GONE_POLL_S)
            if done:
                chunk, pending = pending.result(), None
                yield sse(chunk)
                last_sent = time.monotonic()
            elif await request.is_disconnected():
                return
            elif time.monotonic() - last_sent > PING_S:
                yield ": ping\n\n"
                last_sent = time.monotonic()
    except StopAsyncIteration:
        at_end()
        if batch.request.include_usage:
            yield sse(stream.envelope([]) | {"usage": batch.usage(end_think).json()})
        yield sse("[DONE]")
    except ApiError as error:
        yield sse(error.body())
    finally:
        await closed(backend, batch, pending)


async def closed(backend: Backend, batch: Batch[Any], pending: asyncio.Future[Any] | None = None) -> None:
    """Close a batch in a task of its own: where a client left, every await here is cancelled, the abort must not be."""

    async def close() -> None:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.wait({pending})
        await backend.close(batch)

    task = asyncio.create_task(close())
    _CLOSING.add(task)
    task.add_done_callback(_CLOSING.discard)
    await asyncio.shield(task)


class Api:
    """The POST routes."""

    def __init__(self, backend: Backend, config: ServeRun) -> None:
        self._backend, self._config = backend, config
        self._max_bytes = config.max_body_mib << 20

    async def chat(self, request: "Request") -> Any:
        raw = await read_json(request, self._max_bytes)
        asked = parse_chat(raw, self._config.encoding)
        batch = self._backend.chat(asked)
        end_think = self._backend.tokenizer.special.end_think if asked.encoding.thinking else None

        def at_end() -> None:
            for job in batch.jobs:
                self._backend.remember(asked, job.choice)

        if asked.stream:
            stream = ChatStream(self._backend, batch)
            return await self._streamed(request, batch, stream, end_think, at_end)

        def feed(job: Job[ChatChoice], piece: Piece) -> list[None]:
            job.choice.feed(piece.ids, piece.lp_raw)
            return []

        def finish(job: Job[ChatChoice]) -> list[None]:
            job.choice.finish()
            return []

        await self._sampled(request, batch, feed, finish)
        at_end()
        tokenizer = self._backend.tokenizer
        choices = [
            job.choice.json(job.engine_reason, tokenizer, logprobs=asked.logprobs, token_ids=asked.return_token_ids)
            for job in batch.jobs
        ]
        body = self._body(batch, "chat.completion", choices, end_think)
        if asked.return_token_ids:
            body["prompt_token_ids"] = batch.jobs[0].prompt
        return body

    async def completion(self, request: "Request") -> Any:
        raw = await read_json(request, self._max_bytes)
        asked = parse_completion(raw)
        batch = self._backend.completion(asked)
        if asked.stream:
            return await self._streamed(request, batch, TextStream(batch), None, lambda: None)

        def feed(job: Job[TextChoice], piece: Piece) -> list[None]:
            job.choice.feed(piece.ids, piece.lp_raw)
            return []

        def finish(job: Job[TextChoice]) -> list[None]:
            job.choice.finish()
            return []

        await self._sampled(request, batch, feed, finish)
        choices = [
            job.choice.json(job.engine_reason, logprobs=asked.logprobs, token_ids=asked.return_token_ids)
            for job in batch.jobs
        ]
        if asked.return_token_ids:
            for choice, job in zip(choices, batch.jobs, strict=True):
                choice["prompt_token_ids"] = job.prompt
        return self._body(batch, "text_completion", choices, None)

    def _body(
        self, batch: Batch[Any], kind: str, choices: list[dict[str, Any]], end_think: int | None
    ) -> dict[str, Any]:
        return {
            "id": batch.id,
            "object": kind,
            "created": batch.created,
            "model": batch.model,
            "choices": choices,
            "usage": batch.usage(end_think).json(),
        }

    async def _sampled(self, request: "Request", batch: Batch[Any], feed: Any, finish: Any) -> None:
        """Run a batch to its end, or abort it when the client leaves."""

        async def run() -> None:
            await self._backend.open(batch)
            async for _ in self._backend.sample(batch, feed, finish):
                pass

        try:
            await while_connected(request, run())
        finally:
            await closed(self._backend, batch)

    async def _streamed(
        self, request: "Request", batch: Batch[Any], stream: ChatStream | TextStream, end_think: int | None,
        at_end: Callable[[], None],
    ) -> Any:  # fmt: skip
        from fastapi.responses import StreamingResponse

        try:
            # before the first byte, so that a refusal still has its status
            await self._backend.open(batch)
        except BaseException:
            await closed(self._backend, batch)
            raise
        events = event_stream(request, self._backend, batch, stream, end_think, at_end)
        # a generator that was never started would not close its batch
        await anext(events)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def create_app(backend: Backend, config: ServeRun) -> "FastAPI":
    """The HTTP application over a started engine."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
    from starlette.exceptions import HTTPException

    app = FastAPI(title="burnish", openapi_url=None)
    api = Api(backend, config)
    card = {
        "id": backend.name,
        "object": "model",
        "created": backend.created,
        "owned_by": "burnish",
        "max_model_len": backend.max_context_tokens,
    }

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), status_code=error.status)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        body = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").body()
        return JSONResponse(body, status_code=error.status_code)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.get("/health")
    async def health() -> Response:
        failure = backend.engine.failure
        body = {"status": "ok"} if failure is None else {"status": "failed", "reason": str(failure)}
        return JSONResponse(body, status_code=200 if failure is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await backend.engine.stats()
        except EngineStopped as error:
            raise ApiError(503, str(error)) from error
        return PlainTextResponse("".join(f"burnish_engine_{name} {value}\n" for name, value in stats.items()))

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != backend.name:
            raise ApiError(404, f"The model {name!r} does not exist", param="model", code="model_not_found")
        return JSONResponse(card)

    async def answer(reply: Any) -> Response:
        return reply if isinstance(reply, Response) else JSONResponse(reply)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(await api.chat(request))

    @app.post("/v1/completions")
    async def completion(request: Request) -> Response:
        return await answer(await api.completion(request))

    return app


def open_backend(config: ServeRun) -> Backend:
    """Load the policy and start its engine.

    Raises:
        FileNotFoundError, ValueError: the folder is not a policy, or its tokenizer does not fit its model.
    """
    from burnish.policy.checkpoint.released import load_policy
    from burnish.policy.inference.engine import Engine

    folder = Path(config.policy)
    tokenizer = check_fits(folder, config.encoding.system_token_id)
    model = load_policy(folder)
    engine = Engine(model, config.engine.reserving(tokenizer.never_written()))
    thread = EngineThread(engine)
    thread.start()
    return Backend(
        thread,
        tokenizer,
        name=config.name or folder.resolve().name,
        max_context_tokens=engine.max_context_tokens,
        max_resident=config.engine.max_contexts - config.engine.max_running,
        template=read_tools_template(folder),
    )


def main(config: ServeRun) -> int:
    """Serve until SIGTERM or Ctrl-C; open requests get a few seconds to end."""
    import uvicorn

    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on host={config.host} port={config.port}: {error}") from error
    with listener:
        backend = open_backend(config)
        app = create_app(backend, config)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_S)
        )
        # uvicorn raises the signal again after its shutdown: SIGTERM is an ordered end, not a death
        signal.signal(signal.SIGTERM, lambda *_: None)
        host, port = listener.getsockname()[:2]
        logger.info("Serving %s at http://%s:%d/v1 (Ctrl-C stops)", backend.name, host, port)
        try:
            server.run(sockets=[listener])
        finally:
            backend.engine.stop()
    logger.info("Stopped serving %s", backend.name)
    return 1 if backend.engine.failure is not None else 0
