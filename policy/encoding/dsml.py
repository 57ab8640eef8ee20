"""One tool call in DSML markup read back: an invoke to a ToolCall, or to what is wrong with it.

Special tokens travel as lone surrogates here and in parse.py: no decoded text contains one, so markup cannot be faked
by text that spells it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from burnish.policy.encoding.messages import ToolCall, dump_json
from burnish.policy.encoding.tokenizer import EncodingError

DSML, THINK, END_THINK = "\ud800", "\ud801", "\ud802"
MARKS = re.compile(f"[{DSML}{THINK}{END_THINK}]")
INVOKE_END = re.compile(f"</{DSML} ?invoke>")
INVOKE = re.compile(rf'<{DSML}( ?)invoke name="([^"<>\n\r]+)">(\s*)')
PARAMETER = re.compile(
    rf'<{DSML}( ?)parameter name="([^"<>\n\r]+)" string="(true|false)">(.*?)</{DSML}( ?)parameter>(\s*)', re.DOTALL
)


class ParseErrorKind(StrEnum):
    """What the format does not allow."""

    unclosed_reasoning = "unclosed_reasoning"
    calls_in_reasoning = "calls_in_reasoning"
    missing_wrapper = "missing_wrapper"
    unclosed_calls = "unclosed_calls"
    empty_calls = "empty_calls"
    malformed_call = "malformed_call"
    unknown_tool = "unknown_tool"
    missing_argument = "missing_argument"
    bad_argument = "bad_argument"
    spacing = "spacing"
    text_after_calls = "text_after_calls"
    reserved_token = "reserved_token"
    invalid_utf8 = "invalid_utf8"
    ids_after_end = "ids_after_end"


@dataclass(frozen=True)
class ParseError:
    """One departure from the format: a value, not an exception."""

    kind: ParseErrorKind
    detail: str = ""


def read_invoke(raw: str, tools: Mapping[str, dict[str, Any]]) -> tuple[ToolCall | None, list[ParseError]]:
    """Read one whole invoke.

    Args:
        raw: from the opening tag to the closing one.
        tools: declared schemas by name.

    Returns:
        The call, with an error where only its spacing is off; or None and the error that forbids it.
    """
    head = INVOKE.match(raw)
    end = INVOKE_END.search(raw)
    if head is None or end is None:
        return _refuse(ParseErrorKind.malformed_call, "invoke")
    name, position = head.group(2), head.end()
    arguments: dict[str, Any] = {}
    blanks: list[str] = [head.group(3)]
    spaces = [head.group(1), " " if " " in end.group() else ""]
    while parameter := PARAMETER.match(raw, position):
        space, key, is_text, value, close_space, blank = parameter.groups()
        if key in arguments:
            return _refuse(ParseErrorKind.bad_argument, f"{key} given twice")
        if MARKS.search(value):
            return _refuse(ParseErrorKind.malformed_call, f"markup in {key}")
        try:
            arguments[key] = value if is_text == "true" else _json(value)
        except (ValueError, RecursionError):
            return _refuse(ParseErrorKind.bad_argument, f"{key} is not JSON")
        blanks.append(blank)
        spaces += [space, close_space]
        position = parameter.end()
    if position != end.start():
        return _refuse(ParseErrorKind.malformed_call, f"invoke of {name}")
    if name not in tools:
        return _refuse(ParseErrorKind.unknown_tool, name)
    schema = tools[name].get("parameters")
    required = schema.get("required") if isinstance(schema, dict) else None
    missing = [key for key in required or () if key not in arguments]
    if missing:
        return _refuse(ParseErrorKind.missing_argument, f"{name}: {', '.join(map(str, missing))}")
    expected = ["\n"] * len(blanks) if arguments else ["\n\n"]
    is_tidy = blanks == expected and set(spaces) == {" "}
    errors = [] if is_tidy else [ParseError(ParseErrorKind.spacing, f"in the invoke of {name}")]
    return ToolCall(name=name, arguments=arguments), errors


def _refuse(kind: ParseErrorKind, detail: str) -> tuple[None, list[ParseError]]:
    return None, [ParseError(kind, detail)]


def _json(text: str) -> Any:
    """JSON that can be written again: no NaN, no lone surrogates.

    Raises:
        ValueError: it is neither.
    """
    value = json.loads(text)
    try:
        dump_json(value).encode()
    except (EncodingError, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from error
    return value
