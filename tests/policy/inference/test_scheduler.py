"""Scheduler: order of service, budgets and room, without a model."""

import pytest

from burnish.policy.inference.cache.pages import PagePool
from burnish.policy.inference.cache.windows import WindowPool
from burnish.policy.inference.config import EngineConfig
from burnish.policy.inference.geometry import CacheGeometry
from burnish.policy.inference.prefill import PrefillSource
from burnish.policy.inference.scheduler import Scheduler
from burnish.policy.inference.sequence import Context, SamplingParams, Sequence


@pytest.fixture
def make_scheduler(small_config):
    def make(**values) -> Scheduler:
        config = EngineConfig(**{"num_pages": 4, "max_contexts": 4, "max_running": 4, "max_step_rows": 100, **values})
        geometry = CacheGeometry(small_config)
        pools = PagePool(geometry, config.num_pages), WindowPool(geometry, config.max_contexts)
        return Scheduler(config, geometry, *pools)

    return make


def add(scheduler: Scheduler, name: str, num_ids: int, arrival: int) -> Sequence:
    context = scheduler.contexts.setdefault(name, Context(context_id=name))
    sequence = Sequence(
        request_id=f"{name}{arrival}", context=context, ids=list(range(num_ids)), prompt_len=num_ids,
        sampling=SamplingParams(max_tokens=1000), keep_resident=True, arrival=arrival, limit=10_000,
    )  # fmt: skip
    scheduler.submit(sequence)
    return sequence


def step(scheduler: Scheduler) -> dict[str, int]:
    """Plan, feed and draw: {context: rows}."""
    rows = {}
    for item in scheduler.plan():
        rows[item.sequence.context.context_id] = item.count
        samples = item.samples
        item.sequence.context.computed += item.count
        if item.sequence.context.computed == item.sequence.prefill_end:
            item.sequence.close_prefill()
        if samples:
            item.sequence.ids.append(0)
    return rows


def test_decode_rows_come_first_and_prefill_takes_the_rest_in_order_of_arrival(make_scheduler):
    scheduler = make_scheduler(max_step_rows=20)
    add(scheduler, "a", 5, 0)
    add(scheduler, "b", 30, 1)
    add(scheduler, "c", 9, 2)
    assert step(scheduler) == {"a": 5, "b": 15}
    assert step(scheduler) == {"a": 1, "b": 15, "c": 4}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 5}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_nobody_overtakes_the_request_that_waits_longest(make_scheduler):
    scheduler = make_scheduler(max_step_rows=200)
    add(scheduler, "a", 150, 0)
    step(scheduler)
    add(scheduler, "big", 120, 1)
    add(scheduler, "small", 3, 2)
    for _ in range(3):
        assert "small" not in step(scheduler), "one page is free, but the older request needs two"
    scheduler.finish(scheduler.running[0])
    assert set(step(scheduler)) == {"big", "small"}, "the finished context is idle and makes room"


def test_idle_contexts_whose_own_turn_waits_behind_still_make_room(make_scheduler):
    """All pages are held by idle contexts with waiting requests: the first in line must not wait for the others."""
    scheduler = make_scheduler(max_running=2)
    for i, name in enumerate("ab"):
        sequence = add(scheduler, name, 100, i)
        while sequence.num_sampled == 0:
            step(scheduler)
        scheduler.finish(sequence)
    assert scheduler.pages.num_free == 0
    first = add(scheduler, "a", 140, 2)
    second = add(scheduler, "b", 140, 3)
    assert step(scheduler) == {"a": 40}
    assert first.prefill_source is PrefillSource.resident
    assert second.context.slot == -1
    scheduler.finish(first)
    assert step(scheduler) == {"b": 100}
    assert (second.prefill_source, second.context.epoch) == (PrefillSource.cold, 1)


def test_a_request_that_is_put_back_stands_where_it_arrived(make_scheduler):
    scheduler = make_scheduler()
    first, second = add(scheduler, "a", 10, 0), add(scheduler, "b", 10, 1)
    step(scheduler)
    add(scheduler, "c", 10, 2)
    scheduler.preempt(second)
    scheduler.preempt(first)
    assert [s.context.context_id for s in scheduler.waiting] == ["a", "b", "c"]
    assert scheduler.pages.num_free == 4
    assert scheduler.windows.num_free == 4
    assert step(scheduler) == {"a": 11, "b": 11, "c": 10}
    assert first.context.epoch == 1
    assert [(e.end, e.epoch) for e in first.prefill_entries] == [(10, 0), (11, 1)]


def test_at_most_max_running_requests_run(make_scheduler):
    scheduler = make_scheduler(max_running=2, max_contexts=2)
    for i, name in enumerate("abc"):
        add(scheduler, name, 4, i)
    assert step(scheduler) == {"a": 4, "b": 4}
    assert step(scheduler) == {"a": 1, "b": 1}
    scheduler.finish(scheduler.running[1])
    assert step(scheduler) == {"a": 1, "c": 4}, "the idle context gave up its window slot"
    assert not scheduler.contexts["b"].is_resident
