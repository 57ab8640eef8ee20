"""Messages from OpenAI's JSON form: null is absence, unknown keys are passed over, what is broken is named."""

from typing import Any

import pytest

from burnish.policy.encoding.messages import message_from_openai, messages_from_openai
from burnish.policy.encoding.tokenizer import EncodingError


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("x", "messages must be a list"),
        ([3], r"messages\[0\] must be an object"),
        ([{"role": "robot"}], r"messages\[0\]\.role must be one of"),
        ([{"content": "x"}], r"messages\[0\]\.role must be one of .* got None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] has type 'image_url'"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] must be a function call"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "is not JSON"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "must be a JSON object",
        ),
    ],
)
def test_broken_messages_are_named(raw: Any, message: str) -> None:
    with pytest.raises(EncodingError, match=message):
        messages_from_openai(raw)


def test_dumped_client_messages_read_back_with_nulls_and_unknown_keys() -> None:
    raw = {
        "role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None, "x": 1,
        "reasoning_content": "r", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}],
    }  # fmt: skip
    message = message_from_openai(raw)
    assert (message.content, message.reasoning, message.tool_calls[0].arguments) == ("", "r", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message_from_openai({"role": "user", "content": parts}).content == "a\n\nb"
    assert message_from_openai({"role": "assistant", "tool_calls": None}).tool_calls == ()
