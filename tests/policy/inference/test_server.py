"""The OpenAI endpoint over a scripted engine: shapes, streams, errors, sessions, aborts. The real engine comes last."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.encoding.tokenizer import Tokenizer
from burnish.policy.inference.backend import Backend
from burnish.policy.inference.config import ServeRun
from burnish.policy.inference.engine_thread import EngineThread
from burnish.policy.inference.openai_response import StopCutter
from burnish.policy.inference.sequence import Event, Generation, SamplingParams
from burnish.policy.inference.server import create_app

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"required": ["command"]}}}]
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="bash">\n<｜DSML｜ parameter name="command" string="true">ls</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
HI = [{"role": "user", "content": "Hi"}]


class ScriptedEngine:
    """Samples given texts, one token a step. A request past the script repeats its last text.

    Args:
        spell: text to ids.
        texts: answers in order of admission; `...` at the end goes on for ever.
        step_s: seconds a step takes.
    """

    def __init__(self, spell: Callable[[str], list[int]], *texts: str, step_s: float = 0.0) -> None:
        self.spell, self.texts, self.step_s = spell, list(texts), step_s
        self.requests: list[dict[str, Any]] = []
        self.resident: dict[str, list[int]] = {}
        self.released: list[str] = []
        self.aborted: list[str] = []
        self.fail = False
        self._live: dict[str, dict[str, Any]] = {}
        self._events: list[Event] = []

    def add_request(
        self, request_id: str, context_id: str, ids: list[int], sampling: SamplingParams, keep_resident: bool
    ) -> None:
        if len(ids) == 13:
            raise ValueError("engine: thirteen ids are refused")
        text = self.texts[min(len(self.requests), len(self.texts) - 1)]
        endless = text.endswith("...")
        script = self.spell(text.removesuffix("...")) + ([] if endless else [tiny_tokenizer().special.eos])
        held = self.resident.get(context_id, [])
        cached = len(held) if ids[: len(held)] == held and len(held) < len(ids) else 0
        request = {
            "request_id": request_id, "context_id": context_id, "prompt": list(ids), "sampling": sampling,
            "script": script, "endless": endless, "ids": [], "cached": cached,
        }  # fmt: skip
        self.requests.append(request)
        self._live[request_id] = request

    def step(self) -> list[Generation]:
        time.sleep(self.step_s)
        if self.fail:
            raise RuntimeError("device lost")
        finished = []
        for request in list(self._live.values()):
            place = len(request["ids"])
            script = request["script"]
            token = script[place % len(script)] if request["endless"] else script[place]
            request["ids"].append(token)
            sampling = request["sampling"]
            reason = "stop" if token in sampling.stop_ids else None
            reason = reason or ("length" if len(request["ids"]) == sampling.max_tokens else None)
            self._events.append(
                Event(
                    request_id=request["request_id"],
                    ids=[token],
                    lp_raw=[-0.5 - place],
                    lp_behaviour=[-0.5],
                    versions=[0],
                    finish_reason=reason,
                )
            )
            if reason:
                finished.append(self._end(request, reason))
        return finished

    def _end(self, request: dict[str, Any], reason: str) -> Generation:
        del self._live[request["request_id"]]
        ids = request["ids"]
        self.resident[request["context_id"]] = [*request["prompt"], *ids][:-1]
        return Generation(
            request_id=request["request_id"], context_id=request["context_id"], prompt_len=len(request["prompt"]),
            ids=list(ids), lp_raw=[-0.5 - i for i in range(len(ids))], lp_behaviour=[-0.5] * len(ids),
            versions=[0] * len(ids), routes=None, kept=None, finish_reason=reason, prefill_entries=[],
            cached_tokens=request["cached"],
        )  # fmt: skip

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def abort(self, request_id: str) -> Generation | None:
        self.aborted.append(request_id)
        request = self._live.get(request_id)
        return self._end(request, "abort") if request else None

    def release(self, context_id: str) -> None:
        self.released.append(context_id)
        self.resident.pop(context_id, None)

    def stats(self) -> dict[str, Any]:
        return {"running": len(self._live)}


@pytest.fixture
def spell() -> Callable[[str], list[int]]:
    def spell(text: str) -> list[int]:
        tokenizer = tiny_tokenizer()
        out, rest = [], text
        while rest:
            place, name = min(
                ((rest.find(name), name) for name in ("</think>", "｜DSML｜") if name in rest), default=(len(rest), "")
            )
            out += tokenizer.encode(rest[:place]) + ([tokenizer.added[name]] if name else [])
            rest = rest[place + len(name) :]
        return out

    return spell


class Client:
    """A server's application, called in process."""

    def __init__(self, engine: ScriptedEngine, *, max_context_tokens: int = 500, max_resident: int = 4) -> None:
        self.engine = engine
        self.thread = EngineThread(engine)
        self.thread.start()
        self.config = ServeRun(policy="x", encoding=EncodingConfig(), max_body_mib=1)
        backend = Backend(
            self.thread, tiny_tokenizer(), name="tiny", max_context_tokens=max_context_tokens, max_resident=max_resident
        )
        self.app = create_app(backend, self.config)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.request("POST", f"/v1{path}", json=body)

    def chat(self, **body: Any) -> dict[str, Any]:
        response = self.post("/chat/completions", {"model": "tiny", "messages": HI, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str = "/chat/completions", **body: Any) -> list[dict[str, Any]]:
        default = {"messages": HI} if "chat" in path else {}
        response = self.post(path, {"model": "tiny", "stream": True, **default, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture
def serve(spell: Callable[[str], list[int]]) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def serve(*texts: str, step_s: float = 0.0, **options: Any) -> Client:
        clients.append(Client(ScriptedEngine(spell, *texts, step_s=step_s), **options))
        return clients[-1]

    yield serve
    for client in clients:
        client.thread.stop()


Serve = Callable[..., Client]


def text_of(chunks: list[dict[str, Any]], field: str = "content", index: int = 0) -> str:
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get(field) or "" for delta in deltas)


def test_health_models_and_metrics(serve: Serve) -> None:
    client = serve("x")
    assert client.request("GET", "/health").json() == {"status": "ok"}
    models = client.request("GET", "/v1/models").json()
    assert (models["object"], models["data"][0]["id"], models["data"][0]["object"]) == ("list", "tiny", "model")
    assert client.request("GET", "/v1/models/tiny").json() == models["data"][0]
    assert client.request("GET", "/v1/models/other").status_code == 404
    assert "burnish_engine_running 0\n" in client.request("GET", "/metrics").text


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


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


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
    end = ScriptedEngine.events

    def events(self: ScriptedEngine) -> list[Event]:
        out = end(self)
        for event in out:
            event.lp_raw[0] = float("-inf")
        return out

    monkeypatch.setattr(ScriptedEngine, "events", events)
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


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/chat/completions", {"messages": HI, "model": "other"}, 404, "'other' does not exist"),
        ("/chat/completions", {"messages": []}, 400, "generation must follow"),
        ("/chat/completions", {}, 400, "messages must be a list"),
        ("/chat/completions", {"messages": [{"role": "x"}]}, 400, r"messages[0].role must be one of"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "text parts only",
        ),
        ("/chat/completions", {"messages": HI, "temperature": 3}, 400, "temperature must be a number from 0 to 2"),
        ("/chat/completions", {"messages": HI, "temperature": "hot"}, 400, "temperature must be a number"),
        ("/chat/completions", {"messages": HI, "top_p": 0}, 400, "top_p must be above 0"),
        ("/chat/completions", {"messages": HI, "max_tokens": 0}, 400, "max_tokens must be an integer from 1"),
        ("/chat/completions", {"messages": HI, "n": 1000}, 400, "n must be an integer from 1 to 128"),
        ("/chat/completions", {"messages": HI, "stop": [""]}, 400, "stop must be"),
        ("/chat/completions", {"messages": HI, "stream": "yes"}, 400, "stream must be true or false"),
        ("/chat/completions", {"messages": HI, "top_logprobs": 5}, 400, "top_logprobs=5 is not supported"),
        ("/chat/completions", {"messages": HI, "tool_choice": "required"}, 400, "a call cannot be forced"),
        ("/chat/completions", {"messages": HI, "tools": [{}]}, 400, "tools[0] must be a function"),
        ("/chat/completions", {"messages": HI, "reasoning_effort": "most"}, 400, "reasoning_effort must be one of"),
        ("/chat/completions", {"messages": HI, "reasoning_effort": 0}, 400, "reasoning_effort must be one of"),
        ("/chat/completions", {"messages": HI, "thinking": {"type": "x"}}, 400, "thinking.type must be"),
        ("/chat/completions", {"messages": HI, "response_format": {"type": "xml"}}, 400, "response_format must be"),
        ("/completions", {}, 400, "prompt must be a text"),
        ("/completions", {"prompt": []}, 400, "prompt must be a text"),
        ("/completions", {"prompt": [[1], []]}, 400, "prompt[1] must be"),
        ("/completions", {"prompt": [5, 99999]}, 400, "token id 99999, ids go from 0 to 1023"),
        ("/completions", {"prompt": [True]}, 400, "prompt[0] must be"),
        ("/completions", {"prompt": "x", "echo": True}, 400, "echo=True is not supported"),
        ("/completions", {"prompt": [3] * 13}, 400, "thirteen ids are refused"),
        ("/completions", {"prompt": "\ud800"}, 400, "lone surrogate"),
        ("/completions", [1], 400, "must be a JSON object"),
    ],
)
def test_mistakes_have_openais_error_shape(path: str, body: Any, status: int, message: str, serve: Serve) -> None:
    client = serve("x")
    variants = [body, body | {"stream": True}] if isinstance(body, dict) and "stream" not in body else [body]
    for variant in variants:
        response = client.request("POST", f"/v1{path}", content=json.dumps(variant))
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"
    assert client.request("GET", "/metrics").text == "burnish_engine_running 0\n"


def test_broken_and_large_bodies_and_unknown_routes(serve: Serve) -> None:
    client = serve("x")
    assert "is not JSON" in client.request("POST", "/v1/completions", content=b"{").json()["error"]["message"]
    big = client.request("POST", "/v1/completions", content=b" " * ((1 << 20) + 1))
    assert (big.status_code, big.json()["error"]["code"]) == (413, "request_too_large")
    missing = client.request("GET", "/v2/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    assert client.request("GET", "/v1/completions").status_code == 405


@pytest.mark.parametrize(
    "body", [{"messages": [{"role": "user", "content": "word " * 600}]}, {"messages": HI, "max_tokens": 500}]
)
def test_what_does_not_fit_is_named_as_clients_expect(body: dict[str, Any], serve: Serve) -> None:
    response = serve("x").post("/chat/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "This model's maximum context length is 500 tokens" in error["message"]
    assert "rate limit" not in error["message"]


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


def test_a_failed_engine_is_told_to_every_client(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    client = serve("word...", step_s=0.01)
    threading.Timer(0.3, lambda: setattr(client.engine, "fail", True)).start()
    with caplog.at_level(logging.CRITICAL):
        response = client.post("/chat/completions", {"messages": HI, "stream": True})
    events = [line for line in response.text.split("\n\n") if line]
    assert "device lost" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert len(events) > 3
    for path, body in (("/chat/completions", {"messages": HI}), ("/completions", {"prompt": "x"})):
        failed = client.post(path, body)
        assert failed.status_code == 503
        assert "device lost" in failed.json()["error"]["message"]
    assert client.request("GET", "/health").status_code == 503


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The application behind a real socket."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not shut down"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(stream: bool, serve: Serve) -> None:
    client = serve("word...", step_s=0.01, max_context_tokens=100_000)
    body = {"model": "tiny", "messages": HI, "stream": stream}
    with listening(client.app) as url:
        if stream:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                assert next(response.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=0.3)
        deadline = time.monotonic() + 5
        while client.engine.stats()["running"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert client.engine.stats() == {"running": 0}
        assert len(client.engine.aborted) == 1
        assert client.engine.resident == {}


def test_shutdown_ends_open_streams(serve: Serve) -> None:
    client = serve("word...", step_s=0.01, max_context_tokens=100_000)
    with listening(client.app) as url:
        result: list[str] = []

        def read() -> None:
            body = {"messages": HI, "stream": True}
            try:
                with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    result.extend(response.iter_lines())
            except httpx.HTTPError as error:
                result.append(repr(error))

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.3)
        started = time.monotonic()
        client.thread.stop()
        reader.join(5)
        assert not reader.is_alive()
        assert time.monotonic() - started < 3
        assert "shutting down" in "".join(result)
