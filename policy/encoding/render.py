"""Messages to ids and loss mask: the DeepSeek-V4.1 chat layout.

    BOS [System [effort sentence] [text] [tools]] (User text | System text | Assistant turn)*
    Assistant turn = Assistant (think reasoning /think | /think) content [blank line, calls] EOS

Everything between two special tokens is encoded as one text, so ids equal those of encoding the whole conversation at
once. Every trained stretch starts after a special token and ends with one, so the mask never cuts a token.
Does not know contexts that grow turn by turn (conversation.py), nor how a sampled turn is read back (parse.py).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from burnish.policy.encoding.config import EncodingConfig, History, resolve_effort
from burnish.policy.encoding.messages import Message, Role, ToolCall, dump_json
from burnish.policy.encoding.tokenizer import SPELLINGS, EncodingError, Tokenizer

EFFORT_SENTENCE = "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
RESPONSE_FORMAT = "## Response Format:\n\nThe answer must be JSON that satisfies this schema:\n{schema}"
TOOLS_TEMPLATE = "tools_preamble.txt"
(DSML,) = SPELLINGS["dsml"]
# what may stand between the quotes of a DSML attribute
ATTRIBUTE = re.compile(r'[^"<>\n\r]+')


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation."""

    ids: list[int]
    loss_mask: list[bool]
    """True on exactly the ids the assistant generates: reasoning, content, calls, EOS; never its header."""


@dataclass
class _Turn:
    """One turn of the layout: consecutive user and tool messages are one."""

    role: Role
    message: Message
    texts: list[str] = field(default_factory=list)
    results: list[tuple[int, int]] = field(default_factory=list)
    """(order of the call, index in texts) of every tool result."""


class _Writer:
    """Collects ids and mask; text waits until the next special token, so that it is encoded in one piece."""

    def __init__(self, tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> None:
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self._tokenizer = tokenizer
        self._encode = encode
        self._pending: list[str] = []
        self._trained = False

    def _put(self, ids: Sequence[int], trained: bool) -> None:
        self.ids += ids
        self.mask += [trained] * len(ids)

    def text(self, text: str, trained: bool = False) -> None:
        if text:
            assert not self._pending or trained == self._trained, "a mask boundary inside a stretch of text"
            self._pending.append(text)
            self._trained = trained

    def flush(self) -> None:
        if self._pending:
            self._put(self._encode("".join(self._pending)), self._trained)
            self._pending.clear()

    def special(self, token_id: int, trained: bool = False) -> None:
        self.flush()
        self._put([token_id], trained)

    def sampled(self, ids: Sequence[int], trained: bool) -> None:
        self.flush()
        self._put(ids, trained)

    def markup(self, text: str, trained: bool = False) -> None:
        """Text of our own in which the DSML spelling means the token."""
        for index, piece in enumerate(text.split(DSML)):
            if index:
                self.special(self._tokenizer.special.dsml, trained)
            self.text(piece, trained)


@cache
def read_tools_template(folder: Path | None = None) -> str:
    """The preamble before tool schemas: that of a policy folder where it has one, else ours.

    Raises:
        EncodingError: the file has no {schemas} place.
    """
    path = Path(__file__).with_name(TOOLS_TEMPLATE)
    if folder is not None and (folder / TOOLS_TEMPLATE).is_file():
        path = folder / TOOLS_TEMPLATE
    template = path.read_text(encoding="utf-8").removesuffix("\n")
    if template.count("{schemas}") != 1:
        raise EncodingError(f"{path} must contain {{schemas}} exactly once")
    return template


def is_thinking_kept(messages: Sequence[Message], config: EncodingConfig) -> bool:
    """Whether earlier reasoning stays: tools anywhere in the conversation keep it, so does `history: keep`."""
    return config.history is History.keep or any(message.tools for message in messages)


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    config: EncodingConfig,
    *,
    generate: bool = False,
    continue_final: bool = False,
    template: str | None = None,
    is_trained: Callable[[int], bool] = lambda assistant_turn: True,
    encode: Callable[[str], list[int]] | None = None,
) -> Rendered:
    """Render a whole conversation.

    Args:
        messages: in order; tools ride on a system or developer message (see `with_tools`).
        tokenizer: encodes text literally.
        config: thinking, effort, history.
        generate: end with the assistant's header, so that the next id is its first. Refused after an assistant turn.
        continue_final: leave the EOS of a final assistant turn away, for continuing it.
        template: text with a {schemas} place before the tool schemas; None takes ours.
        is_trained: whether the n-th assistant turn carries loss. A turn whose reasoning is dropped never does: it is
            not what the assistant generated.
        encode: a caching stand-in for `tokenizer.encode`.

    Raises:
        EncodingError: an order of messages the layout has no form for, or text that cannot be encoded.
    """
    kept = is_thinking_kept(messages, config)
    turns = _turns(_leading_system(messages, config))
    last_user = max((i for i, turn in enumerate(turns) if _opens_assistant(turn, i)), default=-1)
    if config.thinking and not kept:
        turns = [t for i, t in enumerate(turns) if t.role is not Role.developer or i >= last_user]
        last_user = max((i for i, turn in enumerate(turns) if _opens_assistant(turn, i)), default=-1)
    writer = _Writer(tokenizer, encode or tokenizer.encode)
    special = tokenizer.special
    writer.special(special.bos)
    assistant_turn = 0
    for index, turn in enumerate(turns):
        is_last = index + 1 == len(turns)
        # a turn before the last user turn loses its reasoning, unless reasoning is kept
        thinks = config.thinking and (kept or index >= last_user)
        if turn.role is Role.assistant:
            _check_follows(turns, index)
            trained = is_trained(assistant_turn) and (thinks or not config.thinking)
            _write_assistant(writer, turn.message, tokenizer, config, thinks, trained)
            sampled = turn.message.sampled_ids
            if sampled is not None:
                # a turn cut at its limit has no EOS of its own; the format needs one before the next turn
                if not is_last and (not sampled or sampled[-1] != special.eos):
                    writer.special(special.eos)
            elif not (is_last and continue_final):
                writer.special(special.eos, trained)
            assistant_turn += 1
            continue
        _write_input(writer, turn, index, tokenizer, config, template)
        next_is_assistant = not is_last and turns[index + 1].role is Role.assistant
        if _opens_assistant(turn, index) and (next_is_assistant or (is_last and generate)):
            writer.special(special.assistant)
            writer.special(special.think if thinks else special.end_think)
    if generate and not (turns and _opens_assistant(turns[-1], len(turns) - 1)):
        raise EncodingError("generation must follow a user, tool or later system message")
    writer.flush()
    return Rendered(writer.ids, writer.mask)


def with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Put tool schemas into the leading system message, which is made where there is none."""
    out = list(messages)
    if not tools:
        return out
    if not out or out[0].role is not Role.system:
        out.insert(0, Message(role=Role.system))
    first = out[0]
    out[0] = Message(
        role=Role.system,
        content=first.content,
        tools=(*first.tools, *tools),
        response_format=first.response_format,
    )
    return out


def _leading_system(messages: Sequence[Message], config: EncodingConfig) -> list[Message]:
    if config.thinking and (not messages or messages[0].role is not Role.system):
        return [Message(role=Role.system), *messages]
    return list(messages)


def _opens_assistant(turn: _Turn, index: int) -> bool:
    return turn.role in (Role.user, Role.developer) or (turn.role is Role.system and index > 0)


def _check_follows(turns: Sequence[_Turn], index: int) -> None:
    if index == 0 or not _opens_assistant(turns[index - 1], index - 1):
        before = turns[index - 1].role if index else "nothing"
        raise EncodingError(f"an assistant message must follow a user, tool or later system message, not {before}")


def _turns(messages: Sequence[Message]) -> list[_Turn]:
    """Merge consecutive user and tool messages into one user turn, tool results sorted by the order of the calls."""
    turns: list[_Turn] = []
    calls: tuple[ToolCall, ...] = ()
    for index, message in enumerate(messages):
        if message.role in (Role.user, Role.tool):
            if not turns or turns[-1].role is not Role.user:
                turns.append(_Turn(Role.user, message))
            turn = turns[-1]
            if message.role is Role.tool:
                order = _call_order(calls, message, len(turn.results), index)
                turn.results.append((order, len(turn.texts)))
                turn.texts.append(f"<tool_result>{message.content}</tool_result>")
            else:
                turn.texts.append(message.content)
        else:
            turns.append(_Turn(message.role, message))
            calls = message.tool_calls if message.role is Role.assistant else calls
    for turn in turns:
        places = [place for _, place in turn.results]
        ordered = [turn.texts[place] for _, place in sorted(turn.results)]
        for place, text in zip(places, ordered, strict=True):
            turn.texts[place] = text
    return turns


def _call_order(calls: Sequence[ToolCall], message: Message, num_before: int, index: int) -> int:
    if not message.tool_call_id:
        return num_before
    for order, call in enumerate(calls):
        if call.id == message.tool_call_id:
            return order
    raise EncodingError(
        f"messages[{index}].tool_call_id is {message.tool_call_id!r}, which the assistant turn before it did not call "
        f"(it called {[call.id for call in calls]})"
    )


def _write_input(
    writer: _Writer, turn: _Turn, index: int, tokenizer: Tokenizer, config: EncodingConfig, template: str | None
) -> None:
    special = tokenizer.special
    if turn.role is Role.user:
        writer.special(special.user)
        writer.text("\n\n".join(turn.texts))
        return
    message = turn.message
    if turn.role is Role.latest_reminder:
        writer.special(special.latest_reminder)
        writer.text(message.content)
        return
    writer.special(special.user if turn.role is Role.developer else special.system)
    if index == 0 and config.thinking:
        writer.text(EFFORT_SENTENCE.format(effort=resolve_effort(config.effort)))
    writer.text(message.content)
    blank = "\n\n" if message.content else ""
    if message.tools:
        before, after = (template or read_tools_template()).split("{schemas}")
        writer.text(blank)
        writer.markup(before)
        writer.text("\n".join(dump_json(tool) for tool in message.tools))
        writer.markup(after)
        blank = "\n\n"
    if message.response_format:
        writer.text(blank + RESPONSE_FORMAT.format(schema=dump_json(message.response_format)))


def _write_assistant(
    writer: _Writer, message: Message, tokenizer: Tokenizer, config: EncodingConfig, thinks: bool, trained: bool
) -> None:
    """Everything after the header but the EOS of a message that was not sampled."""
    special = tokenizer.special
    if message.sampled_ids is not None:
        ids = message.sampled_ids
        if config.thinking and not thinks:
            # reasoning that never closed leaves nothing but its EOS
            start = (
                ids.index(special.end_think) + 1
                if special.end_think in ids
                else len(ids) - (ids[-1:] == (special.eos,))
            )
            ids = ids[start:]
        writer.sampled(ids, trained)
        return
    if thinks:
        writer.text(message.reasoning, trained)
        writer.special(special.end_think, trained)
    writer.text(message.content, trained)
    if message.tool_calls:
        writer.text("\n\n", trained)
        _write_calls(writer, message.tool_calls, trained)


def _write_calls(writer: _Writer, calls: Sequence[ToolCall], trained: bool) -> None:
    writer.markup(f"<{DSML} calls>\n", trained)
    for call in calls:
        writer.markup(f'<{DSML} invoke name="', trained)
        writer.text(_attribute(call.name, "tool name"), trained)
        writer.text('">\n', trained)
        for number, (name, value) in enumerate(call.arguments.items()):
            is_text = isinstance(value, str)
            writer.markup(("\n" if number else "") + f'<{DSML} parameter name="', trained)
            writer.text(_attribute(name, "argument name"), trained)
            writer.text(f'" string="{"true" if is_text else "false"}">', trained)
            writer.text(value if is_text else dump_json(value), trained)
            writer.markup(f"</{DSML} parameter>", trained)
        writer.markup(f"\n</{DSML} invoke>\n", trained)
    writer.markup(f"</{DSML} calls>", trained)


def _attribute(name: str, what: str) -> str:
    if not ATTRIBUTE.fullmatch(name):
        raise EncodingError(
            f"{what} {name!r} cannot be written in a call: it is empty or holds a quote, < > or newline"
        )
    return name
