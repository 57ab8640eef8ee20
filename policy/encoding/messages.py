"""Messages: what a conversation holds before it is ids. Knows OpenAI's JSON form; knows no tokenizer and no layout.

Null is absence: a null content is no content, never the word None. Tool arguments keep their own keys in their own
order, as an object; what a columnar loader merged (other tools' keys filled with null) cannot be told from genuine
nulls here, so data sets carry arguments as JSON text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from burnish.policy.encoding.tokenizer import EncodingError


class Role(StrEnum):
    """Who speaks."""

    system = "system"
    developer = "developer"
    user = "user"
    assistant = "assistant"
    tool = "tool"
    latest_reminder = "latest_reminder"


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool by the assistant."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The client's handle for the result; not part of the encoding."""

    def arguments_json(self) -> str:
        """The arguments as JSON: literal characters, keys as given, one space after each comma and colon."""
        return dump_json(self.arguments)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str = ""
    reasoning: str = ""
    """Assistant only: what it thought before it answered."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Tool only: which call this is the result of; empty takes the order of the messages."""
    tools: tuple[dict[str, Any], ...] = ()
    """System or developer only: function schemas ({name, description, parameters})."""
    response_format: dict[str, Any] | None = None
    """System or developer only: the JSON schema that answers must satisfy."""
    sampled_ids: tuple[int, ...] | None = field(default=None, repr=False)
    """Assistant only: the ids an engine sampled for this turn. They are the truth: never encoded again from the text."""


def dump_json(value: object) -> str:
    """JSON as the encoding writes it: literal characters, keys in their order, ", " and ": ".

    Raises:
        EncodingError: NaN, an infinity, or a value that JSON cannot hold.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EncodingError(f"value cannot be written as JSON: {error}") from error


def parse_arguments(value: object, where: str) -> dict[str, Any]:
    """Tool arguments given as an object or as JSON text of an object.

    Raises:
        EncodingError: anything else, a doubly encoded string included.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise EncodingError(f"{where} is not JSON: {error}") from error
        if isinstance(value, str):
            raise EncodingError(f"{where} is JSON encoded twice: give the object, or its JSON text once")
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        raise EncodingError(f"{where} must be a JSON object, got {type(value).__name__}")
    return dict(value)


def text_of(content: object, where: str) -> str:
    """Text of a content field: a string, null, or a list of text parts joined by a blank line.

    Raises:
        EncodingError: another type, or a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise EncodingError(f"{where} must be a string, null or a list of parts, got {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") in ("text", "input_text", "output_text"):
            texts.append(text_of(part.get("text"), f"{where}[{index}].text"))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise EncodingError(f"{where}[{index}] has type {kind!r}: this policy reads text parts only")
    return "\n\n".join(texts)


def function_schema(tool: object, where: str) -> dict[str, Any]:
    """The function schema in an OpenAI tool entry ({"type": "function", "function": {...}}, or the inner object).

    Raises:
        EncodingError: no function with a name.
    """
    schema = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(schema, Mapping) or not isinstance(schema.get("name"), str) or not schema["name"]:
        raise EncodingError(f"{where} must be a function with a name")
    # null fields come from clients that dump their models: absent, not part of the schema
    return {key: value for key, value in schema.items() if value is not None}


def function_schemas(tools: object, where: str) -> list[dict[str, Any]]:
    """The function schemas of a list of OpenAI tool entries; null is no tools.

    Raises:
        EncodingError: not a list, or an entry that is no function with a name.
    """
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise EncodingError(f"{where} must be a list of functions, got {type(tools).__name__}")
    return [function_schema(tool, f"{where}[{index}]") for index, tool in enumerate(tools)]


def message_from_openai(raw: object, where: str = "message") -> Message:
    """Read one message of OpenAI's chat JSON; unknown keys and nulls are ignored.

    Args:
        raw: the JSON object.
        where: its place in the input, for messages.

    Raises:
        EncodingError: no known role, or a field of the wrong type.
    """
    if not isinstance(raw, Mapping):
        raise EncodingError(f"{where} must be an object, got {type(raw).__name__}")
    try:
        role = Role(raw.get("role"))
    except ValueError:
        raise EncodingError(f"{where}.role must be one of {', '.join(Role)}, got {raw.get('role')!r}") from None
    content = text_of(raw.get("content"), f"{where}.content")
    if role is Role.assistant:
        reasoning = raw.get("reasoning_content") or raw.get("reasoning")
        calls = raw.get("tool_calls") or []
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise EncodingError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
        return Message(
            role=role,
            content=content,
            reasoning=text_of(reasoning, f"{where}.reasoning_content"),
            tool_calls=tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        )
    if role is Role.tool:
        return Message(role=role, content=content, tool_call_id=str(raw.get("tool_call_id") or ""))
    if role in (Role.system, Role.developer):
        return Message(role=role, content=content, tools=tuple(function_schemas(raw.get("tools"), f"{where}.tools")))
    return Message(role=role, content=content)


def _call(raw: object, where: str) -> ToolCall:
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(raw, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise EncodingError(f"{where} must be a function call with a name")
    arguments = parse_arguments(function.get("arguments"), f"{where}.function.arguments")
    return ToolCall(name=function["name"], arguments=arguments, id=str(raw.get("id") or ""))


def messages_from_openai(raw: object) -> list[Message]:
    """Read a list of chat messages.

    Raises:
        EncodingError: an entry that is not a message, named by its index.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise EncodingError(f"messages must be a list, got {type(raw).__name__}")
    return [message_from_openai(item, f"messages[{index}]") for index, item in enumerate(raw)]


def message_to_openai(message: Message) -> dict[str, Any]:
    """OpenAI's JSON of a message: content null when there are only calls, arguments as JSON text."""
    out: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.role is Role.assistant:
        out["reasoning_content"] = message.reasoning or None
        out["tool_calls"] = None
    if message.tool_calls:
        out["content"] = message.content or None
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json()},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    if message.tools:
        out["tools"] = [{"type": "function", "function": tool} for tool in message.tools]
    return out
