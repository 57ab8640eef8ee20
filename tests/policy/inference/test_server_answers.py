"""What the endpoint answers, over an engine of given texts: shapes, streams, stops, token ids, conversations that go on."""

import json
from typing import Any

import pytest
from text_server import HI, Serve, TextEngine

from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.encoding.tokenizer import Tokenizer
from burnish.policy.inference.openai_response import StopCutter
from burnish.policy.inference.sequence import Event

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"required": ["command"]}}}]
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="bash">\n<｜DSML｜ parameter name="command" string="true">ls</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def text_of(chunks: list[dict[str, Any]], field: str = "content", index: int = 0) -> str:
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get(field) or "" for delta in deltas)


def test_a_chat_answer_has_openais_shape(serve: Serve, tokenizer: Tokenizer) -> None:
    client = serve("hello there")
    body = client.chat()
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "hello there", "reasoning_content": None, "tool_calls": None,
    }  # fmt: skip
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    num = len(tokenizer.encode("hello there")) + 1
    special = tokenizer.special
    prompt = [special.bos, special.user, *tokenizer.encode("Hi"), special.assistant, special.end_think]
    assert client.engine.requests[0]["prompt"] == prompt
    assert body["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": num, "total_tokens": len(prompt) + num,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
        "prompt_cache_hit_tokens": 0, "prompt_cache_miss_tokens": len(prompt),
    }  # fmt: skip


def test_sampling_fields_reach_the_engine(serve: Serve) -> None:
    client = serve("x")
    client.chat(temperature=0.3, top_p=0.9, top_k=5, seed=7, max_tokens=3, user="u", metadata={}, unknown=1, n=None)
    sampling = client.engine.requests[0]["sampling"]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.max_tokens) == (
        0.3, 0.9, 5, 7, 3,
    )  # fmt: skip
    client.chat(max_tokens=3, max_completion_tokens=4, top_k=-1)
    assert client.engine.requests[1]["sampling"].max_tokens == 4
    client.chat()
    requests = client.engine.requests
    assert requests[2]["sampling"].max_tokens == 500 - len(requests[2]["prompt"])
    assert requests[1]["sampling"].seed != requests[2]["sampling"].seed


def test_thinking_calls_and_their_stream_agree(serve: Serve, tokenizer: Tokenizer) -> None:
    client = serve(f"why not</think>ok\n\n{CALL}")
    options = {"tools": TOOLS, "reasoning_effort": "max"}
    body = client.chat(**options)
    (choice,) = body["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("why not", "ok")
    assert choice["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokenizer.encode("why not")) + 1
    prompt = tokenizer.decode(client.engine.requests[0]["prompt"])
    assert "Reasoning Effort: 100 " in prompt
    assert '{"name": "bash"' in prompt

    chunks = client.stream(**options, logprobs=True, stream_options={"include_usage": True})
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (text_of(chunks, "reasoning_content"), text_of(chunks)) == ("why not", "ok")
    calls = [c for chunk in chunks for choice in chunk["choices"] for c in choice["delta"].get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "bash", "arguments": ""}
    assert calls[0]["id"].startswith("call_")
    assert "id" not in calls[1]
    assert "".join(c["function"]["arguments"] for c in calls) == '{"command": "ls"}'
    # serving.md bugs 48 and 51: every token's entry once, the reason alone in its chunk, usage last
    last, usage = chunks[-2], chunks[-1]
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["logprobs"]) == ("tool_calls", None)
    assert last["choices"][0]["delta"] == {}
    entries = [e for c in chunks[:-1] for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert len(entries) == usage["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]
    assert [entry["logprob"] for entry in entries] == [-0.5 - i for i in range(len(entries))]
    assert usage["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_content_is_null_when_there_are_only_calls(serve: Serve) -> None:
    message = serve(f"\n\n{CALL}").chat(tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


def test_tool_choice_none_hides_the_tools(serve: Serve, tokenizer: Tokenizer) -> None:
    client = serve(f"\n\n{CALL}")
    choice = client.chat(tools=TOOLS, tool_choice="none")["choices"][0]
    assert choice["message"]["tool_calls"] is None
    assert "bash" not in tokenizer.decode(client.engine.requests[0]["prompt"])


@pytest.mark.parametrize(
    ("body", "thinks", "effort"),
    [
        ({}, False, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"thinking": {"type": "enabled"}}, True, 75),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False, None),
        ({"reasoning_effort": "minimal"}, True, 50),
        ({"reasoning_effort": "medium"}, True, 75),
        ({"reasoning_effort": "xhigh"}, True, 75),
        ({"reasoning_effort": "ultra"}, True, 100),
        ({"reasoning_effort": 37}, True, 37),
        ({"chat_template_kwargs": {"thinking": True, "reasoning_effort": "low"}}, True, 50),
    ],
)
def test_thinking_and_effort(body: dict[str, Any], thinks: bool, effort: int | None, serve: Serve) -> None:
    client = serve("a</think>b")
    client.chat(**body)
    prompt = tiny_tokenizer().decode(client.engine.requests[0]["prompt"])
    assert prompt.endswith("<think>" if thinks else "</think>")
    assert (f"Reasoning Effort: {effort} (" in prompt) == (effort is not None)


def test_choices_have_their_own_seeds_and_requests(serve: Serve) -> None:
    client = serve("one", "two", "three")
    body = client.chat(n=3, seed=5)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["one", "two", "three"]
    assert [request["sampling"].seed for request in client.engine.requests] == [5, 6, 7]
    assert body["usage"]["prompt_tokens"] == len(client.engine.requests[0]["prompt"])
    assert body["usage"]["completion_tokens"] == sum(len(request["ids"]) for request in client.engine.requests)
    chunks = serve("one", "two", "three").stream(n=3)
    assert [text_of(chunks, index=index) for index in range(3)] == ["one", "two", "three"]
    reasons = [(c["index"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(reasons) == [(0, "stop"), (1, "stop"), (2, "stop")]


def test_a_stop_text_ends_the_answer_and_the_request(serve: Serve) -> None:
    client = serve("one two END more words...", step_s=0.001)
    choice = client.chat(stop=[" END", "never"])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one two", "stop")
    assert len(client.engine.aborted) == 1
    chunks = client.stream(stop=" END")
    assert text_of(chunks) == "one two"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert client.request("GET", "/metrics").text == "burnish_engine_running 0\n"


def test_stop_texts_are_found_across_pieces_and_prefixes_are_given_back() -> None:
    for text, stops, expected in [
        ("abcabd", ["abd"], "abc"), ("aab", ["ab"], "a"), ("xyz", ["zz"], "xyz"), ("a\n\nb", ["\n\n"], "a"),
        ("abc", ["c", "b"], "a"), ("abc", [], "abc"),
    ]:  # fmt: skip
        cutter = StopCutter(stops)
        assert "".join(cutter.feed(char) for char in text) + cutter.flush() == expected


def test_max_tokens_is_length(serve: Serve, tokenizer: Tokenizer) -> None:
    client = serve("a b c d e f g")
    body = client.chat(max_tokens=2)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2
    # a cut call is content
    cut = client.stream(max_tokens=2)
    assert cut[-1]["choices"][0]["finish_reason"] == "length"
    call = serve(f"\n\n{CALL}").chat(tools=TOOLS, max_tokens=9)["choices"][0]
    assert (call["finish_reason"], call["message"]["tool_calls"]) == ("length", None)
    assert call["message"]["content"].startswith("\n\n<｜DSML｜ calls>")


def test_token_ids_come_back_exactly(serve: Serve) -> None:
    client = serve("h🙂")
    body = client.chat(return_token_ids=True)
    request = client.engine.requests[0]
    assert body["prompt_token_ids"] == request["prompt"]
    assert body["choices"][0]["token_ids"] == request["ids"]
    chunks = client.stream(return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == request["prompt"]
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == request["ids"]
    # an emoji is held back until it is whole
    assert text_of(chunks) == "h🙂"
    assert "�" not in json.dumps(chunks, ensure_ascii=False)


def test_logprobs_have_tokens_and_bytes_and_no_infinities(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve("a🙂")
    end = TextEngine.events

    def events(self: TextEngine) -> list[Event]:
        out = end(self)
        for event in out:
            event.lp_raw[0] = float("-inf")
        return out

    monkeypatch.setattr(TextEngine, "events", events)
    content = client.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-9999.0] * 6
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "a🙂<｜end▁of▁sentence｜>"


def test_a_conversation_goes_on_from_the_sampled_ids(serve: Serve, tokenizer: Tokenizer) -> None:
    # "cat" sampled as three tokens would be encoded as one
    client = serve("cat", "done")
    split = [*(tokenizer.encode(char)[0] for char in "cat"), tokenizer.special.eos]
    client.engine.spell = lambda text: split[:-1] if text == "cat" else tokenizer.encode(text)
    first = client.chat()["choices"][0]["message"]
    messages = [*HI, first, {"role": "user", "content": "more"}]
    body = client.chat(messages=messages)
    one, two = client.engine.requests
    assert two["prompt"][: len(one["prompt"]) + 4] == one["prompt"] + split
    assert two["context_id"] == one["context_id"]
    # all but the last sampled id were fed already
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == len(one["prompt"]) + 3
    # an edited history is somebody else's
    client.chat(messages=[*HI, {**first, "content": "cat "}, {"role": "user", "content": "more"}])
    assert client.engine.requests[2]["context_id"] != one["context_id"]


def test_reasoning_that_a_client_leaves_out_is_put_back(serve: Serve, tokenizer: Tokenizer) -> None:
    client = serve("deep thought</think>so", "x</think>y")
    first = client.chat(reasoning_effort="high")["choices"][0]["message"]
    history = [*HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "more"}]
    client.chat(messages=history, reasoning_effort="high")
    one, two = client.engine.requests
    assert two["prompt"][: len(one["prompt"]) + len(one["ids"])] == one["prompt"] + one["ids"]


def test_residents_beyond_the_capacity_are_released(serve: Serve) -> None:
    client = serve("a", max_resident=1)
    for number in range(3):
        client.chat(messages=[{"role": "user", "content": f"q{number}"}])
    assert client.engine.released == [request["context_id"] for request in client.engine.requests[:2]]


def test_completions_take_text_ids_and_lists(serve: Serve, tokenizer: Tokenizer) -> None:
    client = serve("x y")
    body = client.post("/completions", {"model": "tiny", "prompt": "ab", "logprobs": 1}).json()
    choice = body["choices"][0]
    assert (body["object"], choice["text"], choice["finish_reason"]) == ("text_completion", "x y", "stop")
    assert client.engine.requests[0]["prompt"] == [tokenizer.special.bos, *tokenizer.encode("ab")]
    assert "".join(choice["logprobs"]["tokens"]) == "x y<｜end▁of▁sentence｜>"
    assert choice["logprobs"]["token_logprobs"][0] == -0.5
    assert choice["logprobs"]["text_offset"][0] == 0
    # ids run exactly as given, also those that the text would merge (serving.md bug 42)
    split = [tokenizer.encode(char)[0] for char in "cat"]
    body = client.post("/completions", {"prompt": split, "return_token_ids": True}).json()
    assert client.engine.requests[1]["prompt"] == split == body["choices"][0]["prompt_token_ids"]
    body = client.post("/completions", {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 1}).json()
    assert [request["prompt"] for request in client.engine.requests[2:]] == [[5, 6], [5, 6], [7], [7]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 4)
    chunks = client.stream("/completions", prompt=["a", "b"], logprobs=1, stream_options={"include_usage": True})
    for index in (0, 1):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in own) == "x y"
        assert sum(len(c["logprobs"]["tokens"]) for c in own if c["logprobs"]) == 4
        assert (own[-1]["finish_reason"], own[-1]["logprobs"]) == ("stop", None)
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_completions_default_to_sixteen_tokens(serve: Serve) -> None:
    client = serve("a...")
    choice = client.post("/completions", {"prompt": "x"}).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["text"])) == ("length", 16)


def test_a_leading_developer_message_is_openais_system_message(serve: Serve, tokenizer: Tokenizer) -> None:
    client = serve("a</think>b")
    messages = [{"role": "developer", "content": "Rules"}, *HI, {"role": "assistant", "content": "a"}, *HI]
    client.chat(messages=messages, reasoning_effort="high")
    assert ")\n\nRules<｜User｜>Hi" in tokenizer.decode(client.engine.requests[0]["prompt"])


def test_a_response_format_enters_the_prompt(serve: Serve, tokenizer: Tokenizer) -> None:
    client = serve("{}")
    schema = {"type": "json_schema", "json_schema": {"schema": {"title": "T"}}}
    client.chat(response_format=schema)
    client.chat(response_format={"type": "json_object"})
    client.chat(response_format={"type": "text"})
    prompts = [tokenizer.decode(request["prompt"]) for request in client.engine.requests]
    assert '{"title": "T"}<｜User｜>' in prompts[0]
    assert '{"type": "object"}<｜User｜>' in prompts[1]
    assert "Response Format" not in prompts[2]
