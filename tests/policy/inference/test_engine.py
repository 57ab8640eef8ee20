"""Engine: turns, residents, aborts, preemption, weight swaps and their records. Numbers: see test_exact_replay."""

import pytest
import torch

from burnish.policy.inference.config import EngineConfig
from burnish.policy.inference.engine import Engine
from burnish.policy.inference.prefill import PrefillEntry, PrefillSource
from burnish.policy.inference.sequence import Generation, SamplingParams
from burnish.policy.inference.weights import WeightUpdateError, weights_digest


def engine_of(model, **values) -> Engine:
    defaults = {"num_pages": 16, "max_contexts": 8, "max_running": 4, "max_step_rows": 32, "deterministic": True}
    return Engine(model, EngineConfig(**{**defaults, **values}))


def params(max_tokens: int = 4, **values) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **values)


def finish(engine: Engine) -> dict[str, Generation]:
    done = {}
    while engine.has_work:
        done |= {generation.request_id: generation for generation in engine.step()}
    return done


def one(engine: Engine, ids: list[int], *, context: str = "c", keep: bool = True, **values) -> Generation:
    engine.add_request("r", context, ids, params(**values), keep)
    return finish(engine)["r"]


PROMPT = list(range(10, 50))


def test_a_second_turn_feeds_only_the_new_rows(model):
    engine = engine_of(model)
    first = one(engine, PROMPT, max_tokens=5)
    assert first.prefill_entries == [
        PrefillEntry(hit=0, source=PrefillSource.cold, end=40, decoder_start=0, decoder_floor=0, version=0, epoch=0)
    ]
    assert (first.cached_tokens, first.finish_reason, len(first.ids)) == (0, "length", 5)
    assert first.routes.shape == (44, 5, 2)  # the last of 45 tokens was not fed
    rows = engine.stats()["rows"]
    second_ids = PROMPT + first.ids + [60, 61, 62]
    second = one(engine, second_ids, max_tokens=2)
    assert second.prefill_entries == [
        PrefillEntry(
            hit=44, source=PrefillSource.resident, end=48, decoder_start=44, decoder_floor=0, version=0, epoch=0
        )
    ]
    assert second.cached_tokens == 44
    assert engine.stats()["rows"] - rows == 4 + 1
    assert second.routes.shape == (5, 5, 2)
    again = one(engine_of(model), second_ids, max_tokens=2)
    assert (second.ids, second.lp_raw) == (again.ids, again.lp_raw)
    assert torch.equal(again.routes.view(torch.int16)[44:], second.routes.view(torch.int16))


def test_the_sampled_token_that_was_not_fed_may_be_replaced(model):
    engine = engine_of(model)
    first = one(engine, PROMPT, max_tokens=3)
    assert one(engine, PROMPT + first.ids[:2] + [99], max_tokens=1).cached_tokens == 42


@pytest.mark.parametrize("ids", [[*PROMPT[:-1], 5, 6, 7, 8, 9], PROMPT[:30]])
def test_ids_that_do_not_extend_the_resident_context_start_a_new_epoch(model, ids):
    engine = engine_of(model)
    one(engine, PROMPT, max_tokens=3)
    second = one(engine, ids, max_tokens=3)
    (entry,) = second.prefill_entries
    assert (entry.source, entry.hit, entry.epoch) == (PrefillSource.cold, 0, 1)
    assert second.lp_raw == one(engine_of(model), ids, max_tokens=3).lp_raw


def test_a_context_that_is_not_kept_leaves_nothing_behind(model):
    engine = engine_of(model)
    one(engine, PROMPT, keep=False)
    stats = engine.stats()
    assert (stats["pages_free"], stats["window_slots_free"], stats["resident"]) == (16, 8, 0)
    assert one(engine, [*PROMPT, 7], keep=False).prefill_entries[0].epoch == 0


def test_release_frees_a_resident_context(model):
    engine = engine_of(model)
    one(engine, PROMPT)
    assert engine.stats()["pages_free"] == 15
    engine.release("c")
    engine.release("never heard of")
    assert engine.stats()["pages_free"] == 16
    assert one(engine, [*PROMPT, 7]).cached_tokens == 0


def test_draws_depend_on_seed_and_position_only(model):
    alone = one(engine_of(model), PROMPT, max_tokens=8, seed=5)
    engine = engine_of(model, max_step_rows=7)
    for i in range(6):
        engine.add_request(f"x{i}", f"x{i}", PROMPT[: 5 * i + 1], params(6, seed=i))
    engine.add_request("r", "c", PROMPT, params(8, seed=5))
    assert finish(engine)["r"].ids == alone.ids
    assert one(engine_of(model), PROMPT, max_tokens=8, seed=6).ids != alone.ids
    # split over two turns, the second one goes on with the same draws
    engine = engine_of(model)
    head = one(engine, PROMPT, max_tokens=3, seed=5)
    tail = one(engine, PROMPT + head.ids, max_tokens=5, seed=5)
    assert head.ids + tail.ids == alone.ids


def test_stop_ids_end_a_request_and_belong_to_its_output(model):
    free = one(engine_of(model), PROMPT, max_tokens=12, seed=3)
    stop = free.ids[4]
    stopped = one(engine_of(model), PROMPT, max_tokens=12, seed=3, stop_ids=(stop,))
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]


def test_a_context_ends_at_its_limit(model):
    engine = engine_of(model, max_context_tokens=43)
    generation = one(engine, PROMPT, max_tokens=100)
    assert (len(generation.ids), generation.finish_reason) == (3, "length")
    with pytest.raises(ValueError, match="has 43 ids, but a context holds 43"):
        engine.add_request("r", "d", PROMPT + generation.ids, params())


def test_decode_rows_run_while_a_long_prompt_is_prefilled_in_chunks(model):
    engine = engine_of(model, max_step_rows=8)
    engine.add_request("short", "a", PROMPT[:4], params(6))
    engine.step()
    engine.add_request("long", "b", PROMPT, params(2))
    finish_order = []
    for step in range(5):
        finish_order += [g.request_id for g in engine.step()]
        assert len(engine.events()) == 1, f"the running request draws in step {step}, the long one does not yet"
    assert finish_order == ["short"]
    assert finish(engine)["long"].lp_raw == one(engine_of(model), PROMPT, max_tokens=2).lp_raw


def test_abort_keeps_everything_in_every_state(model):
    whole = one(engine_of(model), PROMPT, max_tokens=70, seed=1)
    assert whole.routes.shape == (109, 5, 2)
    engine = engine_of(model, max_running=1)
    engine.add_request("r", "c", PROMPT, params(70, seed=1), keep_resident=True)
    engine.add_request("behind", "d", PROMPT, params(2), keep_resident=True)
    for _ in range(2 + 40 - 1):
        engine.step()
    # put back to wait, as a preemption does (serving paper, bug 40)
    engine.scheduler.preempt(engine.scheduler.running[0])
    got = engine.abort("r")
    assert (got.finish_reason, got.ids, got.lp_raw) == ("abort", whole.ids[:40], whole.lp_raw[:40])
    assert len(got.lp_behaviour) == len(got.versions) == 40
    assert torch.equal(got.routes.view(torch.int16), whole.routes.view(torch.int16)[:79])
    waiting = engine.abort("behind")
    assert (waiting.ids, waiting.prefill_entries, waiting.routes) == ([], [], None)
    assert engine.abort("behind") is None
    assert set(engine.scheduler.contexts) == {"c"}
    assert not engine.has_work
    assert engine.step() == []


def test_an_aborted_turn_goes_on_where_it_stopped(model):
    whole = one(engine_of(model), PROMPT, max_tokens=12, seed=1)
    engine = engine_of(model, max_step_rows=16)
    engine.add_request("r", "c", PROMPT, params(12, seed=1), keep_resident=True)
    engine.step(), engine.step()
    early = engine.abort("r")
    assert (early.ids, [e.end for e in early.prefill_entries]) == ([], [32]), "a prefill cut short says how far it came"
    engine.add_request("r", "c", PROMPT, params(12, seed=1), keep_resident=True)
    for _ in range(5):
        engine.step()
    part = engine.abort("r")
    assert part.cached_tokens == 32
    assert part.ids == whole.ids[:5]
    rest = one(engine, PROMPT + part.ids, max_tokens=7, seed=1)
    assert rest.cached_tokens == 44
    assert part.ids + rest.ids == whole.ids
    assert part.lp_raw + rest.lp_raw == whole.lp_raw


def test_events_add_up_to_the_generations(model):
    engine = engine_of(model)
    for i in range(4):
        engine.add_request(f"r{i}", f"c{i}", PROMPT[: 10 * i + 1], params(3 + i, seed=i))
    seen: dict[str, list] = {f"r{i}": [] for i in range(4)}
    reasons, done = {}, {}
    while engine.has_work:
        done |= {g.request_id: g for g in engine.step()}
        if engine.stats()["steps"] == 4:
            done["r3"] = engine.abort("r3")
        for event in engine.events():
            assert event.request_id not in reasons, "nothing after the last event"
            seen[event.request_id] += zip(event.ids, event.lp_raw, event.lp_behaviour, event.versions, strict=True)
            if event.finish_reason:
                reasons[event.request_id] = event.finish_reason
    assert reasons == {"r0": "length", "r1": "length", "r2": "length", "r3": "abort"}
    for name, g in done.items():
        assert seen[name] == list(zip(g.ids, g.lp_raw, g.lp_behaviour, g.versions, strict=True))
    assert engine.events() == []


def test_kept_sets_come_with_truncated_tokens_only(model):
    plain = one(engine_of(model), PROMPT)
    assert plain.kept is None
    cut = one(engine_of(model), PROMPT, top_k=3, seed=4)
    assert [len(k) for k in cut.kept] == [3] * 4
    assert all(token in kept for token, kept in zip(cut.ids, cut.kept, strict=True))
    assert all(b > r for b, r in zip(cut.lp_behaviour, cut.lp_raw, strict=True))


def test_preemption_keeps_outputs_and_prefills_again(model):
    """Three contexts of 60 tokens that all grow past their page, and only four pages."""
    prompts = [[5 + (7 * i + j) % 100 for j in range(60)] for i in range(3)]
    roomy = engine_of(model, num_pages=30)
    tight = engine_of(model, num_pages=4)
    for engine in (roomy, tight):
        for i, ids in enumerate(prompts):
            engine.add_request(f"r{i}", f"c{i}", ids, params(20, seed=i), keep_resident=True)
    want, got = finish(roomy), finish(tight)
    assert roomy.stats()["preemptions"] == 0
    assert tight.stats()["preemptions"] >= 1
    for name, generation in got.items():
        assert (generation.ids, generation.lp_raw) == (want[name].ids, want[name].lp_raw)
        assert torch.equal(generation.routes.view(torch.int16), want[name].routes.view(torch.int16))
    assert len(got["r0"].prefill_entries) == 1, "the oldest request is never put back"
    twice = next(g for g in got.values() if len(g.prefill_entries) > 1)
    assert [e.epoch for e in twice.prefill_entries] == list(range(len(twice.prefill_entries)))
    assert {e.source for e in twice.prefill_entries} == {PrefillSource.cold}
    assert twice.prefill_entries[-1].end > 60


def test_idle_residents_make_room_least_recently_used_first(model):
    engine = engine_of(model, num_pages=3)
    for name in ("a", "b", "c"):
        one(engine, PROMPT, context=name)
    one(engine, [*PROMPT, 9], context="a")  # "b" is now the oldest
    one(engine, PROMPT, context="d")
    assert engine.stats()["evictions"] == 1
    second = one(engine, [*PROMPT, 9, 9, 9, 9, 9], context="b")
    assert (second.cached_tokens, second.prefill_entries[0].epoch) == (0, 1)
    assert engine.stats()["evictions"] == 2


def test_window_slots_are_made_room_for_too(model):
    engine = engine_of(model, max_contexts=2, max_running=2)
    for i in range(5):
        one(engine, PROMPT, context=f"c{i}")
    assert engine.stats()["evictions"] == 3
    assert engine.stats()["resident"] == 2


def test_a_swap_between_two_tokens_is_seen_by_the_next_one(make_model):
    # serving paper, bugs 37 and 39
    old, new = make_model(0), make_model(10)
    before = one(engine_of(make_model(0)), PROMPT, max_tokens=9, seed=2)
    engine = engine_of(old)
    engine.update_weights(old.state_dict(), 7)
    engine.add_request("r", "c", PROMPT, params(9, seed=2), keep_resident=True)
    for _ in range(2 + 4 - 1):
        engine.step()
    engine.update_weights(new, 8)
    assert engine.policy_version == 8
    got = finish(engine)["r"]
    assert got.versions == [7] * 4 + [8] * 5
    assert (got.ids[:4], got.lp_raw[:4]) == (before.ids[:4], before.lp_raw[:4])
    assert torch.equal(got.routes.view(torch.int16)[:43], before.routes.view(torch.int16)[:43]), "frozen when sampled"
    assert [(e.version, e.epoch, e.end) for e in got.prefill_entries] == [(7, 0, 40), (8, 1, 44)]
    fresh = one(engine_of(make_model(10)), PROMPT + got.ids[:4], max_tokens=5, seed=2)
    assert (got.ids[4:], got.lp_raw[4:]) == (fresh.ids, fresh.lp_raw)


def test_a_swap_in_the_middle_of_a_prompt_records_the_routes_of_the_weights_that_sample(make_model):
    engine = engine_of(make_model(0), max_step_rows=17)
    engine.add_request("r", "c", PROMPT, params(4, seed=2), keep_resident=True)
    engine.step()
    engine.update_weights(make_model(10), 1)
    got, fresh = finish(engine)["r"], one(engine_of(make_model(10)), PROMPT, max_tokens=4, seed=2)
    assert got.ids == fresh.ids
    assert torch.equal(got.routes.view(torch.int16), fresh.routes.view(torch.int16))


def test_no_row_of_old_weights_is_read_after_a_swap(make_model):
    # serving paper, bugs 1-5
    engine = engine_of(make_model(0))
    first = one(engine, PROMPT, max_tokens=3)
    engine.update_weights(make_model(10), 1)
    assert engine.stats()["resident"] == 0
    ids = PROMPT + first.ids + [9]
    second = one(engine, ids, max_tokens=3)
    assert second.cached_tokens == 0
    assert (second.prefill_entries[0].epoch, second.prefill_entries[0].version) == (1, 1)
    assert second.lp_raw == one(engine_of(make_model(10)), ids, max_tokens=3).lp_raw


def test_equal_weights_give_equal_bits_after_a_swap_over_garbage(make_model):
    # serving paper, bug 26 and section 3.4: corrupt all weights first, then sync
    model = make_model(0)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = engine_of(model)
    want = one(engine, PROMPT)
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    engine.update_weights({name: torch.full_like(tensor, 0.25) for name, tensor in good.items()}, 1)
    assert one(engine, PROMPT).lp_raw != want.lp_raw
    engine.update_weights(good, 2, digest=weights_digest(good))
    assert one(engine, PROMPT).lp_raw == want.lp_raw
    assert addresses == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", "dtype", "nan", "digest"])
def test_a_failing_update_changes_nothing(make_model, fault):
    engine = engine_of(make_model(0))
    first = one(engine, PROMPT)
    state, digest = dict(make_model(10).state_dict()), None
    name = "layers.2.attn.wkv.weight"
    if fault == "missing":
        del state[name]
    elif fault == "unexpected":
        name = "layers.9.attn.wkv.weight"
        state[name] = torch.zeros(1)
    elif fault == "shape":
        state[name] = state[name][:1]
    elif fault == "dtype":
        state[name] = state[name].double()
    elif fault == "nan":
        state[name] = state[name] * float("nan")
    else:
        name, digest = "digest", "0" * 64
    with pytest.raises(WeightUpdateError, match=name):
        engine.update_weights(state, 1, digest=digest)
    assert engine.policy_version == 0
    assert engine.stats()["rejected_updates"] == 1
    ids = PROMPT + first.ids + [9]
    second = one(engine, ids)
    assert second.cached_tokens == 43, "the caches are as they were"
    assert second.lp_raw == one(engine_of(make_model(0)), ids).lp_raw


def test_a_step_that_fails_is_repeated_from_clean_state(model, make_model):
    want = one(engine_of(model), PROMPT, max_tokens=6, seed=3)
    broken = make_model(0)
    engine = engine_of(broken)
    engine.add_request("r", "c", PROMPT, params(6, seed=3))
    engine.step(), engine.step(), engine.step()
    handle = broken.layers[3].register_forward_hook(lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError):
        engine.step()
    handle.remove()
    got = finish(engine)["r"]
    assert (got.ids, got.lp_raw) == (want.ids, want.lp_raw)
    assert [e.epoch for e in got.prefill_entries] == [0, 1]


def test_wrong_requests_name_what_is_wrong(model):
    engine = engine_of(model)
    engine.add_request("r", "c", PROMPT, params())
    with pytest.raises(ValueError, match="request r is waiting or running"):
        engine.add_request("r", "d", PROMPT, params())
    with pytest.raises(ValueError, match="context c is busy with request r"):
        engine.add_request("s", "c", PROMPT, params())
    with pytest.raises(ValueError, match="context c is busy"):
        engine.release("c")
    with pytest.raises(ValueError, match="has no ids"):
        engine.add_request("s", "d", [], params())
    with pytest.raises(ValueError, match="token id 115, the vocabulary ends at 114"):
        engine.add_request("s", "d", [5, 115], params())
    with pytest.raises(ValueError, match="must be 'recompute', got 'keep'"):
        engine.update_weights(model, 1, mode="keep")
    with pytest.raises(ValueError, match="max_step_rows must be at least"):
        EngineConfig(max_running=8, max_step_rows=4, max_contexts=8)
    assert set(engine.scheduler.contexts) == {"c"}


def test_padding_and_image_ids_are_never_sampled(model):
    engine = engine_of(model, reserved_ids=list(range(20, 115)))
    generation = one(engine, PROMPT, max_tokens=40, seed=8)
    assert set(generation.ids) <= set(range(20)) - {2, 4}
    assert engine.stats()["reserved_draws"] > 10
    assert max(generation.lp_behaviour) <= 0
