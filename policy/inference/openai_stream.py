"""Chunks of streamed answers, in the order that OpenAI's clients expect. Pure: pieces in, JSON objects out.

Every sampled token's log-probability and id ride on exactly one chunk, whatever text the token became; the chunk with
the finish reason carries neither.
"""

from typing import Any

from burnish.policy.encoding.parse import Delta
from burnish.policy.inference.backend import Backend, Batch, Job
from burnish.policy.inference.engine_thread import Piece
from burnish.policy.inference.openai_response import ChatChoice, TextChoice, chat_deltas, logprob_entry


def envelope(kind: str, batch: Batch[Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What surrounds the choices of every chunk."""
    out: dict[str, Any] = {
        "id": batch.id,
        "object": kind,
        "created": batch.created,
        "model": batch.model,
        "choices": choices,
    }
    if batch.request.include_usage:
        out["usage"] = None
    return out


class ChatStream:
    """The chunks of a streamed chat: role, reasoning, content, calls, then the reason alone, then usage."""

    def __init__(self, backend: Backend, batch: Batch[ChatChoice]) -> None:
        self._backend, self._batch = backend, batch
        # tokens whose text is still held back: their log-probabilities ride on the next chunk
        self._owed: dict[int, list[tuple[int, float]]] = {job.choice.index: [] for job in batch.jobs}

    def chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self.envelope([choice])

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return envelope("chat.completion.chunk", self._batch, choices)

    def start(self) -> list[dict[str, Any]]:
        chunks = [self.chunk(job.choice.index, {"role": "assistant", "content": ""}) for job in self._batch.jobs]
        if self._batch.request.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._batch.jobs[0].prompt
        return chunks

    def feed(self, job: Job[ChatChoice], piece: Piece) -> list[dict[str, Any]]:
        deltas = job.choice.feed(piece.ids, piece.lp_raw)
        self._owed[job.choice.index] += zip(piece.ids, piece.lp_raw, strict=True)
        return self._chunks(job, deltas)

    def _chunks(self, job: Job[ChatChoice], deltas: list[Delta]) -> list[dict[str, Any]]:
        chunks = [self.chunk(job.choice.index, delta) for delta in chat_deltas(job.choice, deltas)]
        if chunks:
            self._pay(job, chunks[0])
        return chunks

    def _pay(self, job: Job[ChatChoice], chunk: dict[str, Any]) -> None:
        owed, self._owed[job.choice.index] = self._owed[job.choice.index], []
        request = self._batch.request
        if request.logprobs:
            entries = [logprob_entry(self._backend.tokenizer, *pair) for pair in owed]
            chunk["choices"][0]["logprobs"] = {"content": entries, "refusal": None}
        if request.return_token_ids:
            chunk["choices"][0]["token_ids"] = [token_id for token_id, _ in owed]

    def finish(self, job: Job[ChatChoice]) -> list[dict[str, Any]]:
        chunks = self._chunks(job, job.choice.finish())
        request = self._batch.request
        if self._owed[job.choice.index] and (request.logprobs or request.return_token_ids):
            # EOS has no text, but it is a token
            chunks.append(self.chunk(job.choice.index, {}))
            self._pay(job, chunks[-1])
        # alone: some clients lose the reason of a chunk that carries log-probabilities
        last = self.chunk(job.choice.index, {}, job.choice.finish_reason(job.engine_reason))
        last["choices"][0]["ill_formed"] = job.choice.result().ill_formed
        if job.engine_reason == "abort" and not job.choice.is_stopped:
            last["choices"][0]["stop_reason"] = "abort"
        return [*chunks, last]


class TextStream:
    """The chunks of a streamed completion."""

    def __init__(self, batch: Batch[TextChoice]) -> None:
        self._batch = batch
        self._told: dict[int, int] = {job.choice.index: 0 for job in batch.jobs}

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return envelope("text_completion", self._batch, choices)

    def chunk(self, job: Job[TextChoice], text: str, reason: str | None = None) -> dict[str, Any]:
        choice = job.choice
        told, self._told[choice.index] = self._told[choice.index], len(choice.ids)
        request = self._batch.request
        entry: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": reason}
        if request.logprobs and reason is None:
            entry["logprobs"] = choice.logprobs_json(told)
        if request.return_token_ids and reason is None:
            entry["token_ids"] = choice.ids[told:]
            if not told:
                entry["prompt_token_ids"] = job.prompt
        return self.envelope([entry])

    def feed(self, job: Job[TextChoice], piece: Piece) -> list[dict[str, Any]]:
        text = job.choice.feed(piece.ids, piece.lp_raw)
        has_more = self._batch.request.logprobs or self._batch.request.return_token_ids
        return [self.chunk(job, text)] if text or has_more else []

    def finish(self, job: Job[TextChoice]) -> list[dict[str, Any]]:
        rest = job.choice.finish()
        chunks = [self.chunk(job, rest)] if rest else []
        last = self.chunk(job, "", job.choice.finish_reason(job.engine_reason))
        if job.engine_reason == "abort" and not job.choice.is_stopped:
            last["choices"][0]["stop_reason"] = "abort"
        return [*chunks, last]
