"""The engine loop: one answer a request, deadlines, aborts, swaps between steps, and an engine that dies."""

import asyncio

import pytest
import torch
from fakes import ScriptedEngine

from burnish.policy.inference.sequence import SamplingParams
from burnish.rollout.generator import EngineLoop, GenerateRequest
from burnish.rollout.types import GenerationError
from burnish.rollout.weight_sync import WeightSyncError, publish

EOS = 9


def request(name: str, ids=(1, 2), max_tokens: int = 8, deadline_s: float = 30.0) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, stop_ids=(EOS,), seed=1)
    return GenerateRequest(
        request_id=name, context_id=f"context-{name}", ids=ids, sampling=sampling, deadline_s=deadline_s
    )


def run(engine, steps, tensors=None):
    async def go():
        loop = EngineLoop(engine, "generator-0", tensors)
        try:
            return await steps(loop)
        finally:
            loop.close()

    return asyncio.run(go())


def counting(ids, sampling, version):
    return [ids[0], 5, 6, EOS]


def test_requests_that_overlap_get_their_own_answers():
    async def steps(loop):
        return await asyncio.gather(*(loop.generate(request(str(i), ids=(i, 2))) for i in range(10, 30)))

    answers = run(ScriptedEngine(counting), steps)
    assert [answer.ids for answer in answers] == [[i, 5, 6, EOS] for i in range(10, 30)]


def test_a_request_asked_twice_is_served_once():
    engine = ScriptedEngine(counting)

    async def steps(loop):
        first, second = await asyncio.gather(loop.generate(request("a")), loop.generate(request("a")))
        return first, second, await loop.generate(request("a"))

    first, second, third = run(engine, steps)
    assert first is second is third
    assert len(engine.requests) == 1


def test_at_its_deadline_a_request_is_aborted_and_keeps_what_was_sampled():
    engine = ScriptedEngine(lambda ids, sampling, version: [5] * 10_000, step_s=0.005)

    async def steps(loop):
        answer = await loop.generate(request("slow", max_tokens=10_000, deadline_s=0.15))
        return answer, await loop.generate(request("next", max_tokens=2))

    slow, after = run(engine, steps)
    assert slow.finish_reason == "abort"
    assert 0 < len(slow.ids) == len(slow.lp_raw) == len(slow.versions) < 100
    assert after.finish_reason == "length", "the loop goes on"


def test_a_released_context_ends_its_request_first():
    engine = ScriptedEngine(lambda ids, sampling, version: [5] * 10_000, step_s=0.005)

    async def steps(loop):
        waiting = asyncio.create_task(loop.generate(request("a", max_tokens=10_000)))
        await asyncio.sleep(0.05)
        await loop.release("context-a")
        return await waiting

    assert run(engine, steps).finish_reason == "abort"
    assert engine.released == ["context-a"]


def test_an_engine_that_dies_fails_every_waiter_and_names_itself():
    engine = ScriptedEngine(counting, step_s=0.005)

    async def steps(loop):
        waiting = [asyncio.create_task(loop.generate(request(str(i)))) for i in range(3)]
        await asyncio.sleep(0.001)
        engine.fault = RuntimeError("out of memory")
        failed = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        with pytest.raises(GenerationError, match=r"generator-0.*out of memory"):
            await loop.generate(request("later"))
        return failed

    for error in run(engine, steps):
        assert isinstance(error, GenerationError)
        assert "generator-0 failed: out of memory" in str(error)


def test_a_refused_request_says_why():
    class Strict(ScriptedEngine):
        def add_request(self, *args, **kwargs):
            raise ValueError("token id 99 is outside the vocabulary")

    async def steps(loop):
        with pytest.raises(GenerationError, match="token id 99"):
            await loop.generate(request("a"))

    run(Strict(counting), steps)


def test_a_swap_happens_between_steps_and_later_tokens_carry_the_new_version(tmp_path):
    engine = ScriptedEngine(lambda ids, sampling, version: [5] * 10_000, step_s=0.002)
    manifest = publish({"w": torch.arange(4.0)}, 3, tmp_path)

    async def steps(loop):
        waiting = asyncio.create_task(loop.generate(request("a", max_tokens=60)))
        await asyncio.sleep(0.03)
        receipt = await loop.update_weights(manifest)
        again = await loop.update_weights(manifest)
        return await waiting, receipt, again

    answer, receipt, again = run(engine, steps, tensors=lambda: [("w", torch.arange(4.0))])
    assert (receipt.version, receipt.digest) == (3, manifest.digest) == (again.version, again.digest)
    assert set(answer.versions) == {0, 3}
    assert answer.versions == sorted(answer.versions)


def test_an_engine_that_holds_other_bytes_than_were_published_is_found_out(tmp_path):
    manifest = publish({"w": torch.arange(4.0), "bias": torch.zeros(2)}, 1, tmp_path)

    async def steps(loop):
        with pytest.raises(WeightSyncError, match=r"generator-0.*'bias' differs"):
            await loop.update_weights(manifest)

    # a swap that walks parameters only leaves a buffer as it was
    run(ScriptedEngine(counting), steps, tensors=lambda: [("w", torch.arange(4.0)), ("bias", torch.ones(2))])
