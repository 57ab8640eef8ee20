"""Who acts in an episode: the policy through an engine, or a script (the oracle's solution, or nothing at all).

The policy agent owns token exactness. The context is a list of ids that only grows: what the engine sampled is appended
as it was sampled, with its log-probabilities and versions, and never encoded again from text; only what the environment
says is encoded. Each turn is sealed in the token log before the next one starts.
"""

import time
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

import numpy as np

from burnish.envs.prompts.promptset import Prompt
from burnish.envs.task import Task
from burnish.policy.encoding.conversation import Conversation
from burnish.policy.encoding.messages import Message
from burnish.rollout.config import EpisodeConfig, SamplingConfig
from burnish.rollout.episode import Speech
from burnish.rollout.generator import GenerateRequest
from burnish.rollout.harness.base import Finish, Harness, Run
from burnish.rollout.token_log import TokenLog
from burnish.rollout.types import BlockRef, Context, GenerationError, StopReason

if TYPE_CHECKING:
    from burnish.policy.inference.sequence import Generation, SamplingParams

# a solution with one of these spans lines: it is played as one turn
SPANS_LINES = ("if ", "for ", "while ", "until ", "case ", "function ", "{", "(")


class ScriptedAgent:
    """Says the given contents one after another."""

    def __init__(self, contents: Sequence[str]) -> None:
        self._contents = iter(contents)

    async def speak(self, deadline: float) -> Speech:
        return Speech(content=next(self._contents))

    def hear(self, message: Message) -> None:
        """A script does not react."""

    def finish(self) -> tuple[tuple[Context, ...], tuple[BlockRef, ...]]:
        return (), ()

    async def release(self) -> None:
        """Holds nothing."""


def solution_commands(task: Task) -> list[str]:
    """The oracle's turns: one command a line, or all lines as one turn where a construct spans lines; a prompt's answer."""
    lines = task.solution_lines()
    if isinstance(task, Prompt):
        return lines
    if any(line.startswith(SPANS_LINES) or "<<" in line or line.endswith("\\") for line in lines):
        return ["\n".join((task.solution_dir / "solve.sh").read_text("utf-8").splitlines())]
    return lines


def oracle(task: Task, harness: Harness) -> ScriptedAgent:
    """Plays solution/solve.sh, then leaves."""
    actions = [Run(command=command) for command in solution_commands(task)]
    return ScriptedAgent([harness.render(action) for action in [*actions, Finish()]])


def nop(harness: Harness) -> ScriptedAgent:
    """Leaves at once."""
    return ScriptedAgent([harness.render(Finish())])


def sampling_seed(seed: int, name: str) -> int:
    """Seed of one slot's noise: a function of the run's seed and the slot, not of the attempt or the schedule."""
    return int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


class Generate(Protocol):
    """How the policy agent reaches an engine, wherever it runs."""

    async def generate(self, request: GenerateRequest) -> "Generation": ...

    async def release(self, context_id: str) -> None: ...


class PolicyAgent:
    """The policy, through an engine.

    Args:
        attempt_id: names requests, contexts and the token log.
        conversation: fresh; knows the encoding.
        engine: answers requests.
        log: fresh token log of this attempt.
        sampling, budget: see their config.
        seed: of this slot's noise.
        eos: id that ends a turn.
    """

    def __init__(
        self,
        *,
        attempt_id: str,
        conversation: Conversation,
        engine: Generate,
        log: TokenLog,
        sampling: SamplingConfig,
        budget: EpisodeConfig,
        seed: int,
        eos: int,
    ) -> None:
        self.attempt_id, self.seed, self.eos = attempt_id, seed, eos
        self._conversation, self._engine, self._log = conversation, engine, log
        self._sampling, self._budget = sampling, budget
        self._heard: list[Message] = []
        self._contexts: list[Context] = []
        self._logged = 0
        """Tokens of the current context in sealed blocks."""
        self._routed = 0
        """One past the last position of the current context whose route was recorded or is out of reach."""
        self._turn = 0
        self._num_sampled = 0
        self.newest_version = -1
        """Newest policy version that sampled a token of this episode."""

    def hear(self, message: Message) -> None:
        self._heard.append(message)

    async def speak(self, deadline: float) -> Speech:
        self._conversation.append(self._heard)
        self._heard = []
        self._open_context()
        prompt = list(self._conversation.ids)
        room = self._budget.max_context_tokens - len(prompt)
        if room < 1:
            self._require_a_token(
                f"the prompt has {len(prompt)} tokens, episode.max_context_tokens is {self._budget.max_context_tokens}"
            )
            return Speech(content="", finish_reason=StopReason.context_limit)
        self._log.open_turn(
            context_id=self._contexts[-1].context_id,
            turn=self._turn,
            start=self._logged,
            input_ids=prompt[self._logged :],
        )
        limit = min(self._budget.max_turn_tokens, room)
        sampled, finish_reason = await self._sample(prompt, limit, deadline)
        self._log.seal_turn()
        self._turn += 1
        self._num_sampled += len(sampled)
        parsed = self._conversation.append_sampled(sampled)
        self._logged = len(self._conversation.ids)
        assert self._conversation.ids == prompt + sampled, "a sampled turn enters the context as it was sampled"
        if finish_reason == "length":
            finish_reason = StopReason.max_tokens if limit == self._budget.max_turn_tokens else StopReason.context_limit
        elif finish_reason == "abort":
            self._require_a_token("no token within the episode's wall clock")
            finish_reason = StopReason.wall_clock
        return Speech(
            content=parsed.message.content,
            finish_reason=finish_reason,
            num_input_tokens=len(prompt),
            num_sampled_tokens=len(sampled),
            context_id=self._contexts[-1].context_id,
        )

    async def _sample(self, prompt: list[int], limit: int, deadline: float) -> tuple[list[int], str]:
        """One turn; an aborted request goes on from its partial ids with what is left of the budget."""
        sampled: list[int] = []
        tries = 0
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return sampled, "abort"
            request = GenerateRequest(
                request_id=f"{self.attempt_id}.{self._contexts[-1].context_id}.{self._turn}.{tries}",
                context_id=self._engine_context,
                ids=(*prompt, *sampled),
                sampling=self._sampling_params(limit - len(sampled)),
                deadline_s=left_s,
            )
            generation = await self._engine.generate(request)
            self._record(request, generation)
            sampled += generation.ids
            tries += 1
            if generation.finish_reason != "abort" or len(sampled) >= limit:
                return sampled, "length" if generation.finish_reason == "abort" else generation.finish_reason

    def _record(self, request: GenerateRequest, generation: "Generation") -> None:
        """Into the token log, as sampled.

        Raises:
            GenerationError: the answer is to another request, or breaks its own limits.
        """
        where = f"request {request.request_id}"
        if generation.request_id != request.request_id or generation.prompt_len != len(request.ids):
            raise GenerationError(
                f"{where} with {len(request.ids)} ids got the answer to {generation.request_id} with {generation.prompt_len}"
            )
        if len(generation.ids) > request.sampling.max_tokens:
            raise GenerationError(f"{where} asked for {request.sampling.max_tokens} tokens, got {len(generation.ids)}")
        for entry in generation.prefill_entries:
            self._log.append_prefill(entry)
        try:
            self._log.append_sampled(
                generation.ids, generation.lp_raw, generation.lp_behaviour, generation.versions, generation.kept
            )
        except ValueError as error:
            raise GenerationError(f"{where}: {error}") from error
        self._record_routes(generation)
        if generation.versions:
            self.newest_version = max(self.newest_version, *generation.versions)

    def _record_routes(self, generation: "Generation") -> None:
        """Experts of the rows of this turn's block, as they were when a row was first run: a recompute changes none.

        The last token of the turn before was fed only now, but its block is sealed; no loss row needs its route.
        """
        if generation.routes is None:
            return
        first = generation.cached_tokens
        skipped = max(self._routed, self._logged) - first
        if 0 <= skipped < len(generation.routes):
            self._log.append_routes(first + skipped - self._logged, np.asarray(generation.routes)[skipped:])
            self._routed = first + len(generation.routes)

    def _open_context(self) -> None:
        """Follows the conversation into a new context where it opened one."""
        number = len(self._conversation.contexts) - 1
        while len(self._contexts) <= number:
            parent = self._contexts[-1].context_id if self._contexts else None
            reason = "rewrite" if self._contexts else "root"
            self._contexts.append(Context(context_id=str(len(self._contexts)), parent=parent, reason=reason))
            self._logged = self._routed = 0

    @property
    def _engine_context(self) -> str:
        return f"{self.attempt_id}.{self._contexts[-1].context_id}"

    def _sampling_params(self, max_tokens: int) -> "SamplingParams":
        from burnish.policy.inference.sequence import SamplingParams

        return SamplingParams(
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            max_tokens=max_tokens,
            stop_ids=(self.eos,),
            seed=self.seed,
        )

    def _require_a_token(self, why: str) -> None:
        """Raises:
        GenerationError: nothing was sampled in the whole episode, so there is nothing to grade or train.
        """
        if not self._num_sampled:
            raise GenerationError(f"attempt {self.attempt_id}: {why}")

    def finish(self) -> tuple[tuple[Context, ...], tuple[BlockRef, ...]]:
        self._log.close()
        return tuple(self._contexts), tuple(self._log.refs)

    async def release(self) -> None:
        for context in self._contexts:
            await self._engine.release(f"{self.attempt_id}.{context.context_id}")
