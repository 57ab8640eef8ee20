"""Calls between actors: what a death is told as, and requests that survive the death of their generator."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from burnish.rollout import actors
from burnish.rollout.actors import RemoteEngines, ask
from burnish.rollout.types import ActorGone, ActorLost, GenerationError


class Generator:
    """A handle whose process answers, or is dead."""

    def __init__(self, name: str, *, is_dead: bool = False) -> None:
        self.name, self.is_dead, self.asked = name, is_dead, []
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, request):
        self.asked.append(request.request_id)
        if self.is_dead:
            raise RayActorError
        return f"{request.request_id} by {self.name}"


def request(name: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, context_id=f"context of {name}", deadline_s=5.0)


def test_requests_of_a_dead_generator_are_asked_again_of_the_one_that_takes_its_place():
    async def run():
        dead, alive = Generator("first", is_dead=True), Generator("second")
        engines = RemoteEngines({"generator-0": dead})
        waiting = [asyncio.create_task(engines.generate(request(name))) for name in "ab"]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        engines.replace("generator-0", alive)
        return await asyncio.gather(*waiting), alive.asked

    answers, asked = asyncio.run(run())
    assert answers == ["a by second", "b by second"]
    assert asked == ["a", "b"]


def test_a_generator_that_nothing_replaces_is_named(monkeypatch):
    monkeypatch.setattr(actors, "REPLACE_S", 0.05)

    async def run():
        await RemoteEngines({"generator-0": Generator("first", is_dead=True)}).generate(request("a"))

    with pytest.raises(GenerationError, match=r"generator-0 is gone.*nothing took its place"):
        asyncio.run(run())


def test_what_an_actor_suffered_is_told_by_its_kind():
    async def failing(error):
        raise error

    async def slow():
        await asyncio.sleep(10)

    with pytest.raises(ActorGone) as gone:
        asyncio.run(ask("trainer", failing(RayActorError()), 5.0, "train"))
    assert gone.value.actor == "trainer"
    with pytest.raises(ActorLost, match=r"trainer did not answer to train within 0 s"):
        asyncio.run(ask("trainer", slow(), 0.01, "train"))
    with pytest.raises(ValueError, match="a user's mistake"):
        asyncio.run(ask("trainer", failing(RayTaskError("train", "", ValueError("a user's mistake"))), 5.0))
    with pytest.raises(ActorLost, match="trainer failed: KeyError"):
        asyncio.run(ask("trainer", failing(RayTaskError("train", "", KeyError("x"))), 5.0))
