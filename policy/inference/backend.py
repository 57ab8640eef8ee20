"""What a request becomes between HTTP and the engine: prompts as ids, limits checked, choices sampled side by side.

Knows no HTTP. A chat goes on token-exactly (sessions.py); whoever stops listening must call `close`, which aborts.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from burnish.policy.encoding.parse import StreamParser
from burnish.policy.encoding.render import render, with_tools
from burnish.policy.encoding.tokenizer import Tokenizer
from burnish.policy.inference.engine_thread import EngineStopped, EngineStream, EngineThread, Piece
from burnish.policy.inference.openai_request import ApiError, ChatRequest, CommonRequest, CompletionRequest
from burnish.policy.inference.openai_response import ChatChoice, TextChoice, Usage
from burnish.policy.inference.sessions import ResidentContexts, SampledTurns


class Choice(Protocol):
    """ChatChoice and TextChoice."""

    index: int
    ids: list[int]

    @property
    def is_stopped(self) -> bool: ...


ChoiceT = TypeVar("ChoiceT", bound=Choice)
Out = TypeVar("Out")


@dataclass
class Job(Generic[ChoiceT]):
    """One choice and the engine request behind it."""

    choice: ChoiceT
    prompt: list[int]
    seed: int
    context_id: str = ""
    stream: EngineStream | None = None

    @property
    def engine_reason(self) -> str:
        """The engine's word for how it ended."""
        assert self.stream is not None
        assert self.stream.generation is not None, "asked before the end"
        return self.stream.generation.finish_reason

    @property
    def cached_tokens(self) -> int:
        generation = self.stream.generation if self.stream else None
        return generation.cached_tokens or 0 if generation else 0


@dataclass
class Batch(Generic[ChoiceT]):
    """All choices of one HTTP request."""

    id: str
    model: str
    request: CommonRequest
    jobs: list[Job[ChoiceT]]
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self, end_think: int | None) -> Usage:
        """Counts over all choices; a prompt shared by several choices counts once.

        Args:
            end_think: id that ends reasoning, where the turns began with it.
        """
        firsts = self.jobs[:: self.request.num_choices]
        usage = Usage(
            prompt_tokens=sum(len(job.prompt) for job in firsts),
            completion_tokens=sum(len(job.choice.ids) for job in self.jobs),
            cached_tokens=sum(job.cached_tokens for job in firsts),
        )
        if end_think is not None:
            for ids in (job.choice.ids for job in self.jobs):
                usage.reasoning_tokens += ids.index(end_think) + 1 if end_think in ids else len(ids)
        return usage


class Backend:
    """The served policy.

    Args:
        engine: started.
        tokenizer: the policy's.
        name: of the model, for clients.
        max_context_tokens: prompt and output together.
        max_resident: contexts to keep between two turns of a chat.
        template: text before tool schemas; None takes ours.
    """

    def __init__(
        self,
        engine: EngineThread,
        tokenizer: Tokenizer,
        *,
        name: str,
        max_context_tokens: int,
        max_resident: int = 0,
        template: str | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.max_context_tokens = max_context_tokens
        self.created = int(time.time())
        self._template = template
        self._turns = SampledTurns()
        self._contexts = ResidentContexts(max_resident)

    def chat(self, request: ChatRequest) -> Batch[ChatChoice]:
        """Render the messages and lay out the choices.

        Raises:
            ApiError: 400 messages that cannot be rendered or are too long, 404 unknown model.
        """
        self._check_model(request)
        try:
            rendered = render(
                with_tools(self._turns.recall(request.messages, request.setting), request.tools),
                self.tokenizer,
                request.encoding,
                generate=True,
                template=self._template,
            )
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        batch_id = f"chatcmpl-{uuid.uuid4().hex}"
        tools = [*request.tools, *(tool for message in request.messages for tool in message.tools)]
        choices = [
            ChatChoice(
                index=index,
                parser=StreamParser(self.tokenizer, thinking=request.encoding.thinking, tools=tools),
                stops=request.stops,
                call_prefix=f"call_{batch_id[-12:]}_",
            )
            for index in range(request.num_choices)
        ]
        return Batch(batch_id, self.name, request, self._jobs([rendered.ids], choices, request))

    def completion(self, request: CompletionRequest) -> Batch[TextChoice]:
        """Lay out the choices of all prompts. A text prompt gets BOS before it; ids run exactly as given.

        Raises:
            ApiError: 400 ids outside the vocabulary or too many, 404 unknown model.
        """
        self._check_model(request)
        prompts: list[list[int]] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                try:
                    prompts.append([self.tokenizer.special.bos, *self.tokenizer.encode(prompt)])
                except ValueError as error:
                    raise ApiError(400, str(error), param="prompt") from error
            else:
                wrong = [token_id for token_id in prompt if not 0 <= token_id < self.tokenizer.vocab_size]
                if wrong:
                    last = self.tokenizer.vocab_size - 1
                    raise ApiError(400, f"prompt has token id {wrong[0]}, ids go from 0 to {last}", param="prompt")
                prompts.append(list(prompt))
        choices = [
            TextChoice(index=index, tokenizer=self.tokenizer, stops=request.stops)
            for index in range(len(prompts) * request.num_choices)
        ]
        return Batch(f"cmpl-{uuid.uuid4().hex}", self.name, request, self._jobs(prompts, choices, request))

    def _check_model(self, request: CommonRequest) -> None:
        if request.model not in (None, self.name):
            raise ApiError(
                404,
                f"The model {request.model!r} does not exist; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def _jobs(
        self, prompts: Sequence[list[int]], choices: Sequence[ChoiceT], request: CommonRequest
    ) -> list[Job[ChoiceT]]:
        for prompt in prompts:
            self._check_length(len(prompt), request.max_tokens)
        order = itertools.product(prompts, range(request.num_choices))
        return [
            Job(choice, prompt, seed=request.seed + number)
            for choice, (prompt, number) in zip(choices, order, strict=True)
        ]

    def _check_length(self, num_prompt: int, max_tokens: int | None) -> None:
        limit = self.max_context_tokens
        if num_prompt + (max_tokens or 1) > limit:
            asked = f"{max_tokens} in the completion" if max_tokens else "and at least 1 in the completion"
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt + (max_tokens or 1)} tokens ({num_prompt} in the prompt, {asked}). Please reduce the "
                "length of the prompt or of the completion.",
                param="messages",
                code="context_length_exceeded",
            )

    async def open(self, batch: Batch[ChoiceT]) -> None:
        """Admit every choice.

        Raises:
            ApiError: 400 refused by the engine, 503 the engine stopped.
        """
        from burnish.policy.inference.sequence import SamplingParams

        request = batch.request
        for number, job in enumerate(batch.jobs):
            # siblings share a prompt, but a resident context serves one request at a time
            resident = self._contexts.take(job.prompt) if number % request.num_choices == 0 else None
            job.context_id = resident or f"{batch.id}.{number}"
            sampling = SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                max_tokens=request.max_tokens or self.max_context_tokens - len(job.prompt),
                stop_ids=(self.tokenizer.special.eos,),
                seed=job.seed,
            )
            try:
                job.stream = await self.engine.open(
                    f"{batch.id}.{number}", job.context_id, job.prompt, sampling, keep_resident=True
                )
            except ValueError as error:
                raise ApiError(400, str(error)) from error
            except EngineStopped as error:
                raise ApiError(503, str(error)) from error

    async def sample(
        self,
        batch: Batch[ChoiceT],
        feed: Callable[[Job[ChoiceT], Piece], list[Out]],
        finish: Callable[[Job[ChoiceT]], list[Out]],
    ) -> AsyncGenerator[Out, None]:
        """Sample all choices side by side; a choice that hits its stop text is aborted.

        Args:
            batch: opened.
            feed: takes a piece into its choice; what it returns is yielded, in order.
            finish: called once a choice is at its end.

        Raises:
            ApiError: 503, the engine stopped.
        """
        ready: asyncio.Queue[list[Out] | ApiError | None] = asyncio.Queue()

        async def pump(job: Job[ChoiceT]) -> None:
            assert job.stream is not None, "open comes first"
            try:
                async for piece in job.stream.pieces():
                    if not job.choice.is_stopped:
                        ready.put_nowait(feed(job, piece))
                        if job.choice.is_stopped:
                            await self.engine.abort(job.stream.request_id)
                ready.put_nowait(finish(job))
                ready.put_nowait(None)
            except EngineStopped as error:
                ready.put_nowait(ApiError(503, str(error)))

        tasks = [asyncio.create_task(pump(job)) for job in batch.jobs]
        num_open = len(tasks)
        try:
            while num_open:
                outs = await ready.get()
                if isinstance(outs, ApiError):
                    raise outs
                if outs is None:
                    num_open -= 1
                for out in outs or ():
                    yield out
        finally:
            for task in tasks:
                task.cancel()

    def remember(self, request: ChatRequest, choice: ChatChoice) -> None:
        """Keep a finished turn's ids for the conversation's next request."""
        if not choice.is_stopped:
            self._turns.remember(request.messages, choice.result().message, request.setting)

    async def close(self, batch: Batch[ChoiceT]) -> None:
        """After the last choice, or when nobody listens any more: abort what runs, keep or release its contexts."""
        try:
            for job in batch.jobs:
                if job.stream is None:
                    continue
                generation = job.stream.generation
                if generation is None:
                    await self.engine.abort(job.stream.request_id)
                    await self.engine.release(job.context_id)
                    continue
                for context_id in self._contexts.put(job.context_id, [*job.prompt, *generation.ids]):
                    await self.engine.release(context_id)
        except EngineStopped:
            # the engine's state is gone with it
            return
