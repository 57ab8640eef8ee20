"""OpenAI responses: what was sampled, in the shapes that OpenAI's clients read. Pure: no engine, no HTTP."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.policy.encoding.messages import ToolCall, message_to_openai
from burnish.policy.encoding.parse import Delta, Parsed, StreamParser
from burnish.policy.encoding.tokenizer import IncrementalDecoder, Tokenizer

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


class StopCutter:
    """Finds stop texts in a growing text; holds back what may become one.

    Args:
        stops: the texts that end an answer; they are not part of it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_hit = False

    def feed(self, text: str) -> str:
        """More text; returns what is certain to stay."""
        if self.is_hit or not self._stops:
            return "" if self.is_hit else text
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_hit = True
            return self._held[: min(places)]
        keep = max(
            (n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])),
            default=0,
        )
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What was held back when no more text comes."""
        out, self._held = ("" if self.is_hit else self._held), ""
        return out


@dataclass
class Usage:
    """Token counts of one request, all its choices together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
        }


def logprob_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    """Chat form: one sampled token with its log-probability at temperature 1."""
    raw = tokenizer.token_bytes(token_id)
    value = logprob if math.isfinite(logprob) else LOWEST_LOGPROB
    return {"token": tokenizer.token(token_id), "logprob": value, "bytes": list(raw), "top_logprobs": []}


@dataclass
class ChatChoice:
    """One choice of a chat answer while it is sampled.

    Args:
        index: among the choices.
        parser: fresh.
        stops: texts that end the content.
        call_prefix: start of this choice's call ids.
    """

    index: int
    parser: StreamParser
    stops: Sequence[str]
    call_prefix: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""

    def __post_init__(self) -> None:
        self._cutter = StopCutter(self.stops)

    @property
    def is_stopped(self) -> bool:
        """A stop text came: nothing more is wanted."""
        return self._cutter.is_hit

    def feed(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[Delta]:
        """More sampled tokens; returns what they add to the message."""
        self.ids += ids
        self.logprobs += logprobs
        return self._take(self.parser.feed(ids))

    def finish(self) -> list[Delta]:
        """No more tokens; returns what was held back."""
        deltas = self._take(self.parser.finish())
        if rest := self._cutter.flush():
            self.content += rest
            deltas.append(Delta(content=rest))
        return deltas

    def _take(self, deltas: Sequence[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if self.is_stopped:
                break
            if delta.content:
                if text := self._cutter.feed(delta.content):
                    self.content += text
                    out.append(Delta(content=text))
            elif delta.call is not None:
                if rest := self._cutter.flush():
                    self.content += rest
                    out.append(Delta(content=rest))
                call = ToolCall(
                    name=delta.call.name,
                    arguments=delta.call.arguments,
                    id=f"{self.call_prefix}{self.index}_{len(self.calls)}",
                )
                self.calls.append(call)
                out.append(Delta(call=call))
            elif delta.reasoning:
                self.reasoning += delta.reasoning
                out.append(delta)
        return out

    def finish_reason(self, engine_reason: str) -> str:
        """OpenAI's word; an abort reads as stop, its true name goes into an extra field."""
        if self.is_stopped or engine_reason == "abort":
            return "stop"
        if engine_reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"

    def result(self) -> Parsed:
        return self.parser.result()

    def json(self, engine_reason: str, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> dict[str, Any]:
        """The choice of a whole answer."""
        parsed = self.result()
        message = message_to_openai(parsed.message) | {
            "content": self.content or (None if self.calls else ""),
            "reasoning_content": self.reasoning or None,
            "tool_calls": [call_json(call) for call in self.calls] or None,
        }
        choice: dict[str, Any] = {
            "index": self.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self.finish_reason(engine_reason),
            "ill_formed": parsed.ill_formed,
        }
        if engine_reason == "abort" and not self.is_stopped:
            choice["stop_reason"] = "abort"
        if logprobs:
            pairs = zip(self.ids, self.logprobs, strict=True)
            choice["logprobs"] = {"content": [logprob_entry(tokenizer, *pair) for pair in pairs], "refusal": None}
        if token_ids:
            choice["token_ids"] = self.ids
        return choice


def call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_json()}
    return {"id": call.id, "type": "function", "function": function}


def chat_deltas(choice: ChatChoice, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """OpenAI's stream deltas: a call comes as its head, then its arguments."""
    out: list[dict[str, Any]] = []
    number = len(choice.calls) - sum(delta.call is not None for delta in deltas)
    for delta in deltas:
        if delta.call is not None:
            head = {"name": delta.call.name, "arguments": ""}
            out.append({"tool_calls": [{"index": number, "id": delta.call.id, "type": "function", "function": head}]})
            arguments = {"arguments": delta.call.arguments_json()}
            out.append({"tool_calls": [{"index": number, "function": arguments}]})
            number += 1
        elif delta.reasoning:
            out.append({"reasoning_content": delta.reasoning})
        else:
            out.append({"content": delta.content})
    return out


@dataclass
class TextChoice:
    """One choice of a plain completion while it is sampled."""

    index: int
    tokenizer: Tokenizer
    stops: Sequence[str]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        self._cutter = StopCutter(self.stops)
        self._decoder = IncrementalDecoder(self.tokenizer)

    @property
    def is_stopped(self) -> bool:
        return self._cutter.is_hit

    def feed(self, ids: Sequence[int], logprobs: Sequence[float]) -> str:
        """More sampled tokens; returns the text they add. EOS is an id but no text."""
        self.ids += ids
        self.logprobs += logprobs
        shown = [token_id for token_id in ids if token_id != self.tokenizer.special.eos]
        text = self._cutter.feed(self._decoder.feed(shown))
        self.text += text
        return text

    def finish(self) -> str:
        """No more tokens; returns what was held back."""
        text = self._cutter.feed(self._decoder.flush()) + self._cutter.flush()
        self.text += text
        return text

    def finish_reason(self, engine_reason: str) -> str:
        return "length" if engine_reason == "length" and not self.is_stopped else "stop"

    def logprobs_json(self, start: int = 0) -> dict[str, Any]:
        """The legacy form, from the `start`-th sampled token on."""
        entries = [
            logprob_entry(self.tokenizer, *pair) for pair in zip(self.ids[start:], self.logprobs[start:], strict=True)
        ]
        offset = len(self.tokenizer.decode(self.ids[:start]))
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def json(self, engine_reason: str, *, logprobs: bool, token_ids: bool) -> dict[str, Any]:
        """The choice of a whole answer."""
        choice: dict[str, Any] = {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs_json() if logprobs else None,
            "finish_reason": self.finish_reason(engine_reason),
        }
        if engine_reason == "abort" and not self.is_stopped:
            choice["stop_reason"] = "abort"
        if token_ids:
            choice["token_ids"] = self.ids
        return choice


def sse(body: dict[str, Any] | str) -> str:
    """One server-sent event."""
    return f"data: {body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)}\n\n"
