"""What a request asks and this server cannot do is refused by name, never left out."""

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.inference.openai_request import NEUTRAL, ApiError, parse_chat, parse_completion
from burnish.policy.inference.server import ClientGone, read_json

MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "min_p": 0.05,
    "logit_bias": {"5": -100},
    "best_of": 4,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_sampling_field_that_is_not_honoured_is_refused_and_its_neutral_value_is_not(name):
    for value in (NEUTRAL[name], None):
        assert parse_chat({"messages": MESSAGES, name: value}, EncodingConfig()).num_choices == 1
        assert parse_completion({"prompt": "x", name: value}).num_choices == 1
    for parse in (lambda raw: parse_chat(raw | {"messages": MESSAGES}, EncodingConfig()), parse_completion):
        with pytest.raises(ApiError, match=f"{name}=.* is not supported: the sampler has") as caught:
            parse({"prompt": "x", name: ASKED[name]})
        assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("tools", [3, "f", {"name": "f"}, [3], [{"function": {"name": ""}}]])
def test_tools_that_are_none_are_named(tools):
    with pytest.raises(ApiError, match="tools") as caught:
        parse_chat({"messages": MESSAGES, "tools": tools}, EncodingConfig())
    assert caught.value.param == "tools"


class Leaving:
    async def stream(self):
        yield b'{"mess'
        raise ClientDisconnect


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error_of_ours():
    request: Any = Leaving()
    with pytest.raises(ClientGone):
        asyncio.run(read_json(request, 1000))
