"""Ids of an assistant turn back to a message: reasoning, content, tool calls; streaming, tolerant, never raising.

Only the real DSML token counts as markup, never its spelling in plain tokens. What the format does not allow is
reported as ParseError values (`ill_formed`) while the message stays as useful as it can be: a call counts once its
invoke closes, its tool is declared and its required arguments are there; other markup comes back as content.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from burnish.policy.encoding.dsml import (
    DSML,
    END_THINK,
    INVOKE_END,
    THINK,
    ParseError,
    ParseErrorKind,
    read_invoke,
)
from burnish.policy.encoding.messages import Message, Role, ToolCall
from burnish.policy.encoding.tokenizer import IncrementalDecoder, Tokenizer

OPENER = f"<{DSML} calls>"
CLOSER = re.compile(f"</{DSML} ?calls>")
# the separator before a block, or any beginning of it, must wait until the next token shows what it was
HELD = tuple(f"{blank}<{DSML}" for blank in ("\n\n", "\n", ""))
TAG_END = re.compile(r"[>\n]")
TAG_LIMIT = 64
# a wrapper of another version or a misspelt one: not an opener, but calls may follow it
NEAR_OPENER = re.compile(rf"<{DSML} ?\w{{0,40}}calls ?>\s*")
NEAR_CLOSER = re.compile(rf"</{DSML} ?\w{{0,40}}calls ?>")
NEAR_TAG = re.compile(rf"<{DSML} ?(\w{{0,40}}calls ?>|invoke )")


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """How a sampled turn reads."""

    message: Message
    """With `sampled_ids` set: the ids go on as they are, whatever they read as."""
    errors: tuple[ParseError, ...]
    truncated: bool
    """The turn did not end with EOS: it was cut at a limit, stopped or aborted."""

    @property
    def ill_formed(self) -> bool:
        return bool(self.errors)


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A piece of a streamed turn: exactly one of the three."""

    reasoning: str = ""
    content: str = ""
    call: ToolCall | None = None


class _State(StrEnum):
    reasoning = "reasoning"
    content = "content"
    calls = "calls"
    orphan = "orphan"
    after = "after"


class StreamParser:
    """Reads one assistant turn as it is sampled.

    Args:
        tokenizer: the policy's.
        thinking: the header ended with <think>, so the turn starts with reasoning.
        tools: declared function schemas; without any, no markup is read.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.ids: list[int] = []
        self.errors: list[ParseError] = []
        self.ended = False
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)
        special = tokenizer.special
        self._marks = {special.dsml: DSML, special.think: THINK, special.end_think: END_THINK}
        self._tools = {tool["name"]: tool for tool in tools}
        self._state = _State.reasoning if thinking else _State.content
        self._buffer = ""
        self._at_line_start = True
        self._orphans = True
        self._opener = ""
        self._num_in_block = 0
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._deltas: list[Delta] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Take more sampled ids; returns what became certain."""
        for token_id in ids:
            self.ids.append(token_id)
            if self.ended:
                self._error(ParseErrorKind.ids_after_end)
            elif token_id == self._tokenizer.special.eos:
                self.ended = True
            elif token_id in self._marks:
                self._buffer += self._decoder.flush() + self._marks[token_id]
            elif token_id in self._tokenizer.added_ids:
                self._error(ParseErrorKind.reserved_token, self._tokenizer.token(token_id))
                self._buffer += self._decoder.flush() + self._tokenizer.token(token_id)
            else:
                self._buffer += self._decoder.feed([token_id])
        self._advance(final=False)
        return self._take()

    def finish(self) -> list[Delta]:
        """No more ids will come; returns what was held back."""
        self._buffer += self._decoder.flush()
        self._check_utf8()
        self._advance(final=True)
        return self._take()

    def result(self) -> Parsed:
        """The whole turn, after `finish`."""
        message = Message(
            role=Role.assistant,
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
            sampled_ids=tuple(self.ids),
        )
        return Parsed(message=message, errors=tuple(dict.fromkeys(self.errors)), truncated=not self.ended)

    # --- the machine: every step consumes from the buffer or changes state, and says whether to go on

    def _advance(self, final: bool) -> None:
        steps = {
            _State.reasoning: self._read_reasoning,
            _State.content: self._read_content,
            _State.calls: self._read_calls,
            _State.orphan: self._read_orphan,
            _State.after: self._read_after,
        }
        while steps[self._state](final):
            pass

    def _read_reasoning(self, final: bool) -> bool:
        end = self._buffer.find(END_THINK)
        opener = self._buffer.find(OPENER) if self._tools else -1
        if opener >= 0 and (end < 0 or opener < end):
            self._error(ParseErrorKind.calls_in_reasoning)
            self._open_calls(opener, self._add_reasoning)
            return True
        if end >= 0:
            self._add_reasoning(self._buffer[:end])
            self._buffer = self._buffer[end + 1 :]
            self._state = _State.content
            return True
        if final and self.ended:
            self._error(ParseErrorKind.unclosed_reasoning)
        self._release(self._add_reasoning, final)
        return False

    def _read_content(self, final: bool) -> bool:
        start = self._buffer.find(f"<{DSML}") if self._tools else -1
        if start < 0:
            self._release(self._add_content, final)
            return False
        if self._buffer.startswith(OPENER, start):
            self._open_calls(start, self._add_content)
            return True
        end = TAG_END.search(self._buffer, start)
        if end is None and not final and len(self._buffer) - start < TAG_LIMIT:
            before = max(start - 2, 0)
            self._add_content(self._buffer[:before])
            self._buffer = self._buffer[before:]
            return False
        line_start = self._buffer[start - 1] == "\n" if start else self._at_line_start
        if self._orphans and line_start and NEAR_TAG.match(self._buffer, start):
            text, self._buffer = self._buffer[:start], self._buffer[start:]
            kept = text.removesuffix("\n\n") if text.endswith("\n\n") else text.removesuffix("\n")
            self._add_content(kept)
            self._opener = text[len(kept) :]
            self._state = _State.orphan
            return True
        self._add_content(self._buffer[: start + 2])
        self._buffer = self._buffer[start + 2 :]
        return True

    def _open_calls(self, start: int, add: Callable[[str], None]) -> None:
        text = self._buffer[:start]
        kept = text.removesuffix("\n\n")
        if kept == text:
            self._error(ParseErrorKind.spacing, "no blank line before the calls")
        add(kept)
        self._opener = text[len(kept) :] + OPENER
        self._buffer = self._buffer[start + len(OPENER) :]
        self._num_in_block = 0
        self._state = _State.calls

    def _read_calls(self, final: bool) -> bool:
        stripped = self._buffer.lstrip()
        blank = self._buffer[: len(self._buffer) - len(stripped)]
        if closer := CLOSER.match(stripped):
            if not self._num_in_block:
                self._error(ParseErrorKind.empty_calls)
                self._add_content(self._opener + blank + closer.group(), is_expected=True)
            elif blank != "\n" or " " not in closer.group():
                self._error(ParseErrorKind.spacing, "at the end of the calls")
            self._buffer = stripped[closer.end() :]
            self._state = _State.after
            return True
        if re.match(f"<{DSML} ?invoke ", stripped) and (end := INVOKE_END.search(stripped)):
            raw = stripped[: end.end()]
            call = self._read_invoke(raw)
            self._buffer = stripped[end.end() :]
            if call is None:
                self._add_content(self._opener + blank + raw, is_expected=True)
                self._opener = ""
            else:
                if blank != "\n":
                    self._error(ParseErrorKind.spacing, "before an invoke")
                self._opener = ""
                self._add_call(call)
            return True
        if not final and self._may_go_on(stripped):
            return False
        if final and self.ended and not stripped and self._num_in_block:
            self._error(ParseErrorKind.unclosed_calls)
            self._buffer = ""
            return False
        if self.ended or not final:
            self._error(ParseErrorKind.malformed_call)
        opener = "" if self._num_in_block else self._opener
        self._buffer = opener + self._buffer
        if final:
            # a cut call is text: it may have been anything
            self._add_content(self._buffer, is_expected=not self.ended)
            self._buffer = ""
            return False
        self._state = _State.content
        # the opener itself must not be read again
        self._add_content(self._buffer[: len(opener)], is_expected=True)
        self._buffer = self._buffer[len(opener) :]
        return True

    @staticmethod
    def _may_go_on(text: str) -> bool:
        """Whether `text` can still become the next invoke or the end of the block."""
        heads = (f"<{DSML} invoke ", f"<{DSML}invoke ", f"</{DSML} calls>", f"</{DSML}calls>")
        return any(head.startswith(text[: len(head)]) for head in heads)

    def _read_orphan(self, final: bool) -> bool:
        """Calls without a proper opener: taken only when the rest of the turn is nothing but whole calls."""
        if not final:
            return False
        calls = self._whole_calls(self._buffer) if self.ended else None
        if calls is None:
            self._orphans = False
            self._buffer, self._opener = self._opener + self._buffer, ""
            self._state = _State.content
            return True
        self._error(ParseErrorKind.missing_wrapper)
        self._buffer = ""
        for call in calls:
            self._add_call(call)
        return False

    def _whole_calls(self, text: str) -> list[ToolCall] | None:
        near = NEAR_OPENER.match(text)
        rest = text[near.end() :] if near else text
        calls: list[ToolCall] = []
        num_errors = len(self.errors)
        while rest.startswith("<" + DSML) and (end := INVOKE_END.search(rest)):
            call = self._read_invoke(rest[: end.end()])
            if call is None:
                break
            calls.append(call)
            rest = rest[end.end() :].lstrip()
        if not calls or NEAR_CLOSER.sub("", rest).strip():
            del self.errors[num_errors:]
            return None
        return calls

    def _read_after(self, final: bool) -> bool:
        rest = self._buffer.lstrip()
        if self._buffer:
            self._error(ParseErrorKind.text_after_calls)
        self._buffer = rest
        if rest:
            self._state = _State.content
        return bool(rest)

    def _read_invoke(self, raw: str) -> ToolCall | None:
        call, errors = read_invoke(raw, self._tools)
        self.errors += errors
        return call

    # --- what comes out

    def _release(self, add: Callable[[str], None], final: bool) -> None:
        """Pass the buffer on, but for an end that may begin a block (only where tools are declared)."""
        held = 0
        if self._tools and not final:
            for pattern in (*HELD, OPENER):
                longest = min(len(pattern), len(self._buffer))
                held = max(held, next((n for n in range(longest, 0, -1) if self._buffer.endswith(pattern[:n])), 0))
            if (start := self._buffer.rfind(f"<{DSML}")) >= 0 and OPENER.startswith(self._buffer[start:]):
                blank = 2 if self._buffer[:start].endswith("\n\n") else 0
                held = max(held, len(self._buffer) - start + blank)
        cut = len(self._buffer) - held
        add(self._buffer[:cut])
        self._buffer = self._buffer[cut:]

    def _spell(self, text: str, is_expected: bool) -> str:
        special = self._tokenizer.special
        names = {DSML: special.dsml, THINK: special.think, END_THINK: special.end_think}
        for mark, token_id in names.items():
            if mark in text:
                if not is_expected:
                    self._error(ParseErrorKind.reserved_token, self._tokenizer.token(token_id))
                text = text.replace(mark, self._tokenizer.token(token_id))
        return text

    def _add_reasoning(self, text: str) -> None:
        if text:
            self._reasoning.append(self._spell(text, False))
            self._deltas.append(Delta(reasoning=self._reasoning[-1]))

    def _add_content(self, text: str, is_expected: bool = False) -> None:
        if text:
            self._at_line_start = text.endswith("\n")
            self._content.append(self._spell(text, is_expected))
            self._deltas.append(Delta(content=self._content[-1]))

    def _add_call(self, call: ToolCall) -> None:
        self._num_in_block += 1
        self._calls.append(call)
        self._deltas.append(Delta(call=call))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _error(self, kind: ParseErrorKind, detail: str = "") -> None:
        self.errors.append(ParseError(kind, detail))

    def _check_utf8(self) -> None:
        raw = self._tokenizer.decode_bytes(self.ids)
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            # a turn cut inside a character is not the policy's mistake
            if self.ended or error.reason != "unexpected end of data":
                self._error(ParseErrorKind.invalid_utf8, f"at byte {error.start}")


def parse(ids: Sequence[int], tokenizer: Tokenizer, *, thinking: bool, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
    """Read a whole sampled turn: the ids after the assistant's header, with or without EOS."""
    parser = StreamParser(tokenizer, thinking=thinking, tools=tools)
    parser.feed(ids)
    parser.finish()
    return parser.result()
