"""The server's application, called in process, over an engine that samples given texts."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.inference.backend import Backend
from burnish.policy.inference.config import ServeRun
from burnish.policy.inference.engine_thread import EngineThread
from burnish.policy.inference.sequence import Event, Generation, SamplingParams
from burnish.policy.inference.server import create_app

HI = [{"role": "user", "content": "Hi"}]


class TextEngine:
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


class Client:
    """A server's application, called in process."""

    def __init__(self, engine: TextEngine, *, max_context_tokens: int = 500, max_resident: int = 4) -> None:
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


Serve = Callable[..., Client]
