"""The endpoint over the real engine and a tiny policy folder, and the command itself."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from burnish.policy.config import InitRun
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.encoding.tokenizer import load_tokenizer
from burnish.policy.inference.config import EngineConfig, ServeRun
from burnish.policy.inference.server import create_app, open_backend
from burnish.policy.initialize import main as initialize
from burnish.policy.presets import preset
from burnish.policy.released_config import to_released

SIZES = {"num_pages": 64, "max_contexts": 12, "max_running": 8, "max_step_rows": 64}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies") / "tiny-policy"
    initialize(InitRun(preset="tiny", out=str(folder), seed=3))
    return folder


@pytest.fixture(scope="module")
def app(policy: Path) -> Iterator[Any]:
    config = ServeRun(policy=str(policy), engine=EngineConfig(deterministic=True, **SIZES))
    backend = open_backend(config)
    yield create_app(backend, config)
    backend.engine.stop()


def post(app: Any, *bodies: dict[str, Any], path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
    """All bodies at once."""

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    replies = asyncio.run(send())
    assert [reply.status_code for reply in replies] == [200] * len(bodies), replies[0].text
    return [reply.json() for reply in replies]


def test_answers_do_not_depend_on_their_neighbours(app: Any) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": f"Write {n}"}], "seed": n, "max_tokens": 12, "return_token_ids": True}
        for n in range(6)
    ]
    together = [body["choices"][0]["token_ids"] for body in post(app, *bodies)]
    alone = [post(app, body)[0]["choices"][0]["token_ids"] for body in bodies]
    assert together == alone
    assert len({tuple(ids) for ids in together}) == 6


def test_a_resident_turn_samples_what_a_cold_one_samples(app: Any) -> None:
    first = {
        "messages": [{"role": "user", "content": "Sort the file"}],
        "max_tokens": 8,
        "seed": 1,
        "return_token_ids": True,
    }
    (one,) = post(app, first)
    message = one["choices"][0]["message"]
    messages = [*first["messages"], message, {"role": "user", "content": "<output>\n</output>"}]
    second = {"messages": messages, "max_tokens": 8, "seed": 2, "return_token_ids": True, "logprobs": True}
    (warm,) = post(app, second)
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(one["prompt_token_ids"]) + len(one["choices"][0]["token_ids"]) - 1
    shown = one["prompt_token_ids"] + one["choices"][0]["token_ids"]
    assert warm["prompt_token_ids"][: len(shown)] == shown
    cold_body = {
        "prompt": warm["prompt_token_ids"],
        "max_tokens": 8,
        "seed": 2,
        "return_token_ids": True,
        "logprobs": 1,
    }
    # the resident context moved on, so the same ids are prefilled from the start
    (cold,) = post(app, cold_body, path="/v1/completions")
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"][0]["token_ids"] == warm["choices"][0]["token_ids"]
    assert cold["choices"][0]["logprobs"]["token_logprobs"] == [
        entry["logprob"] for entry in warm["choices"][0]["logprobs"]["content"]
    ]


def test_reserved_tokens_are_never_sampled(policy: Path, app: Any) -> None:
    tokenizer = load_tokenizer(policy)
    assert tokenizer.fingerprint == tiny_tokenizer().fingerprint
    special = tokenizer.special
    forbidden = set(tokenizer.added_ids) - {special.eos, special.end_think, special.dsml}
    assert tokenizer.never_written() == forbidden
    assert EngineConfig(reserved_ids=[7, 9]).reserving([9, 8]).reserved_ids == [7, 8, 9]
    body = {"prompt": "a", "max_tokens": 60, "n": 6, "seed": 0, "return_token_ids": True, "temperature": 2}
    (reply,) = post(app, body, path="/v1/completions")
    sampled = {token_id for choice in reply["choices"] for token_id in choice["token_ids"]}
    assert len(sampled) > 50
    assert not sampled & forbidden


def test_a_folder_that_is_no_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        open_backend(ServeRun(policy=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(to_released(preset("tiny"))))
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        open_backend(ServeRun(policy=str(tmp_path)))
    with pytest.raises(ValueError, match=r"port must be 0 \(a free one\) to 65535"):
        ServeRun(policy="x", port=70000)


def test_the_command_serves_until_it_is_asked_to_stop(policy: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "burnish.configs.cli",
        "serve",
        f"policy={policy}",
        "port=0",
        "engine.num_pages=32",
    ]
    command += ["engine.max_contexts=4", "engine.max_running=2", "engine.max_step_rows=32", "name=mine"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    try:
        url = None
        for line in process.stdout:
            lines.append(line)
            if match := re.search(r"Serving mine at (http://\S+)/v1", line):
                url = match.group(1)
                break
        assert url is not None, "".join(lines)
        body = {"model": "mine", "stream": True, "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        events = [line for line in reply.text.split("\n\n") if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("length", "stop")
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == 0, rest
        assert "Stopped serving mine" in rest
    finally:
        process.kill()
        process.wait()
