"""The endpoint's HTTP over an engine of given texts: routes, errors in OpenAI's shape, failures, clients that leave."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from text_server import HI, Serve


def test_health_models_and_metrics(serve: Serve) -> None:
    client = serve("x")
    assert client.request("GET", "/health").json() == {"status": "ok"}
    models = client.request("GET", "/v1/models").json()
    assert (models["object"], models["data"][0]["id"], models["data"][0]["object"]) == ("list", "tiny", "model")
    assert client.request("GET", "/v1/models/tiny").json() == models["data"][0]
    assert client.request("GET", "/v1/models/other").status_code == 404
    assert "burnish_engine_running 0\n" in client.request("GET", "/metrics").text


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
