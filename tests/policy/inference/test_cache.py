"""The caches hold real FP4 and FP8 bytes of exact size, and the forward reads those bytes and no others."""

import pytest
import torch

from burnish.kernels.quant.reference import (
    decode_fp8,
    decode_mxfp4,
    decode_nvfp4,
    encode_fp8,
    encode_mxfp4,
    fake_fp8,
    fake_mxfp4,
    fake_nvfp4,
)
from burnish.policy.config import ModelConfig
from burnish.policy.inference.cache.codec import read_fp8, read_mxfp4, read_nvfp4, write_nvfp4
from burnish.policy.inference.cache.pages import PagePool
from burnish.policy.inference.cache.store import Feed, PagedStore
from burnish.policy.inference.cache.windows import WindowPool
from burnish.policy.inference.config import EngineConfig
from burnish.policy.inference.engine import Engine
from burnish.policy.inference.geometry import CacheGeometry
from burnish.policy.inference.sequence import SamplingParams
from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.rows import plain_rows


@pytest.fixture(scope="module")
def flash_attention_config() -> ModelConfig:
    """Row layouts, window, top-k, pool and the four Full layers of the release; narrow everywhere else."""
    return ModelConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=6, num_attention_heads=2,
        q_lora_rank=16, o_lora_rank=16, o_groups=2, n_routed_experts=4, num_experts_per_tok=2,
        compress_ratios=[0, 2, 2, 2, 1, 1], kv_source_layer_ids=[1, 2, 3, 4], index_source_layer_ids=[1, 2, 3, 4, 5],
        index_n_heads=2, candidate_source_layer_id=4, hc_mult=2, hc_sinkhorn_iters=2, engram_layer_ids=[],
        engram_num_embeddings=[], num_nextn_predict_layers=0, initializer_range=0.3,
    )  # fmt: skip


def test_flash_rows_and_pages_have_the_released_sizes():
    geometry = CacheGeometry(ModelConfig())
    assert (geometry.main_row_bytes, geometry.index_row_bytes, geometry.window_row_bytes) == (288, 68, 528)
    assert geometry.page_bytes == 56_960
    pool = PagePool(geometry, num_pages=8192 // 64)
    assert pool.size_bytes == 7_290_880 == ModelConfig().global_bytes(8192)
    assert {tuple(t.shape) for t in pool.main.values()} == {(4096, 288), (8192, 288)}
    assert {tuple(t.shape) for t in pool.index.values()} == {(4096, 68), (8192, 68)}
    windows = WindowPool(geometry, num_slots=2)
    halves = sum(half.nbytes for half in windows.halves.values())
    assert windows.rings.nbytes == 2 * 40 * 128 * 528
    assert windows.rings.nbytes + halves == 2 * geometry.window_state_bytes


def test_8192_tokens_of_flash_attention_read_the_pool_and_nothing_else(flash_attention_config, make_model):
    """The context's first 8,190 tokens are written entry by entry; the store feeds the last two."""
    config = flash_attention_config
    model = make_model(3, config)
    engine = Engine(model, EngineConfig(num_pages=128, max_contexts=1, max_running=1, max_step_rows=64))
    assert engine.pages.size_bytes == 7_290_880 == config.global_bytes(8192)
    for source in engine.geometry.sources:
        num = 8190 // source.ratio
        main, key = torch.randn(num, config.head_dim), torch.randn(num, config.index_head_dim)
        engine.pages.write(source.layer, torch.arange(num), main, key)
    windows = torch.randn(config.num_hidden_layers, config.sliding_window, config.head_dim)
    ids = torch.randint(5, 64, (2,)).tolist()
    start = 8190

    def run() -> torch.Tensor:
        for layer in range(config.num_hidden_layers):
            engine.windows.write(layer, torch.arange(config.sliding_window), windows[layer])
        feed = Feed(slot=0, pages=range(128), start=start, ids=ids)
        store = PagedStore(engine.pages, engine.windows, [feed], pad=False)
        with torch.inference_mode():
            return model.logits(model(store.rows, store).hidden)

    clean = run()
    assert torch.equal(run(), clean)
    tables = {"main": engine.pages.main, "index": engine.pages.index}
    for kind, by_layer in tables.items():
        for layer, table in by_layer.items():
            kept = table.clone()
            table ^= 0x11 if kind == "index" else 0x08  # other codes, finite scales
            assert not torch.equal(run(), clean), f"logits ignore the {kind} rows of layer {layer}"
            table.copy_(kept)
    assert torch.equal(run(), clean)


def test_flash_attention_geometry_matches_the_trainer_bit_for_bit(flash_attention_config, make_model):
    model = make_model(4, flash_attention_config)
    ids = torch.randint(5, 64, (27,)).tolist()
    rows = plain_rows([ids])
    want = model(rows, GraphStore(model.config, rows), deterministic=True).hidden[:27]
    got = []
    engine = Engine(
        model, EngineConfig(num_pages=4, max_contexts=1, max_running=1, max_step_rows=10, deterministic=True)
    )
    engine.on_rows = lambda work, hidden: got.append(hidden[: work[0].count].clone())
    engine.add_request("r", "c", ids, SamplingParams(max_tokens=1))
    engine.step(), engine.step(), engine.step()
    assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("channels", [32, 64, 512])
def test_rounded_values_are_stored_and_read_back_bit_for_bit(channels):
    """The store encodes what the model has rounded; sizes from the smallest subnormal scale to saturation."""
    x = torch.randn(1000, channels) * 10.0 ** torch.empty(1000, 1).uniform_(-5, 5)
    x[3], x[4], x[5] = 0, -0.0, 1e-30
    x[6, 0], x[7] = 1e6, 448.0
    # largest values around 9 and 10 units of 2^-9, where the scale of a rounded NVFP4 group differs from the raw one's
    x[8:400] = torch.empty(392, channels).uniform_(-1, 1) * torch.linspace(5 * 2.0**-9, 14 * 2.0**-9, 392).unsqueeze(1)
    formats = [
        (fake_nvfp4, write_nvfp4, decode_nvfp4, read_nvfp4, channels // 2 + channels // 16),
        (fake_mxfp4, encode_mxfp4, decode_mxfp4, read_mxfp4, channels // 2 + channels // 32),
        (fake_fp8, encode_fp8, decode_fp8, read_fp8, channels + channels // 32),
    ]
    for fake, encode, decode, read, num_bytes in formats:
        rounded = fake(x)
        stored = encode(rounded)
        assert stored.dtype == torch.uint8
        assert stored.shape == (1000, num_bytes)
        assert torch.equal(read(stored, channels).view(torch.int32), decode(stored, channels).view(torch.int32))
        wrong = (read(stored, channels).view(torch.int32) != rounded.view(torch.int32)).nonzero()
        assert not len(wrong), f"{fake.__name__}: {len(wrong)} values differ, first {wrong[0].tolist()}"


def test_pages_are_counted_shared_and_freed_once(small_config):
    pool = PagePool(CacheGeometry(small_config), num_pages=5)
    first = pool.take(3)
    pool.retain(first[:1])
    pool.release(first)
    assert pool.num_free == 4
    with pytest.raises(ValueError, match="asked for 5 pages, 4 of 5 are free"):
        pool.take(5)
    pool.release(first[:1])
    assert pool.num_free == 5
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(first[:1])
    with pytest.raises(AssertionError, match="is free"):
        pool.retain(first[:1])


def test_a_ratio_that_does_not_divide_the_page_is_refused(small_config):
    from dataclasses import replace

    config = replace(small_config, compress_ratios=[0, 3, 1, 1, 1])
    with pytest.raises(ValueError, match="compression ratio 3 of layer 1"):
        CacheGeometry(config)


@pytest.mark.parametrize("pad", [False, True])
def test_a_step_touches_only_its_own_pages_slots_and_places(small_config, model, pad):
    """Everything that belongs to nobody in the step is poisoned, older ring places too, and survives as poison."""
    geometry = CacheGeometry(small_config)
    contexts = [torch.randint(5, 115, (n,)).tolist() for n in (70, 3, 41)]
    rows = plain_rows(contexts)
    want = model(rows, GraphStore(small_config, rows), deterministic=True).hidden[: len(rows)].split([70, 3, 41, 14])
    pages, windows = PagePool(geometry, 9), WindowPool(geometry, 6)
    poison = 0x7F  # NaN as an E4M3 value or scale
    for table in (*pages.main.values(), *pages.index.values(), windows.rings):
        table.fill_(poison)
    for half in windows.halves.values():
        half.fill_(float("nan"))
    owned = {0: ([6, 2], 4), 1: ([8], 1), 2: ([3], 5)}
    fed = [0, 0, 0]
    for counts in ((5, 1, 0), (20, 1, 9), (1, 0, 32), (44, 1, 0)):
        active = [i for i, count in enumerate(counts) if count]
        feeds = [
            Feed(slot=owned[i][1], pages=owned[i][0], start=fed[i], ids=contexts[i][fed[i] : fed[i] + counts[i]])
            for i in active
        ]
        store = PagedStore(pages, windows, feeds, pad=pad)
        hidden = model(store.rows, store, deterministic=pad).hidden
        first = 0
        for i in active:
            part = hidden[first : first + counts[i]]
            expected = want[i][fed[i] : fed[i] + counts[i]]
            assert torch.equal(part, expected) if pad else torch.allclose(part, expected, atol=1e-3)
            first += counts[i]
            fed[i] += counts[i]
    assert fed == [70, 3, 41]
    used_pages = {page for held, _ in owned.values() for page in held}
    for source in geometry.sources:
        for table in (pages.main[source.layer], pages.index[source.layer]):
            by_page = table.view(9, -1)
            assert all(bool((by_page[p] == poison).all()) != (p in used_pages) for p in range(9))
    for slot in (0, 2, 3):
        assert bool((windows.rings[:, slot] == poison).all())
    assert bool((windows.rings[:, 1, 3:] == poison).all()), "places of positions that were never fed"


def test_poisoned_pages_change_what_a_resident_context_says(small_config, model):
    def second_turn(poison_kind: str | None) -> list[float]:
        engine = Engine(model, EngineConfig(num_pages=4, max_contexts=2, max_running=2))
        ids = list(range(5, 65))
        engine.add_request("a", "c", ids, SamplingParams(max_tokens=2, temperature=0.0), keep_resident=True)
        while engine.has_work:
            for generation in engine.step():
                ids = ids + generation.ids
        if poison_kind == "ring":
            engine.windows.rings.bitwise_xor_(0x80)  # every sign
        elif poison_kind:
            for table in getattr(engine.pages, poison_kind).values():
                table.bitwise_xor_(0x08 if poison_kind == "main" else 0x11)
        engine.add_request("b", "c", [*ids, 9, 10], SamplingParams(max_tokens=1, temperature=0.0))
        (generation,) = [*engine.step()]
        assert generation.cached_tokens == len(ids) - 1
        return generation.lp_raw

    clean = second_turn(None)
    assert second_turn(None) == clean
    for kind in ("main", "index", "ring"):
        assert second_turn(kind) != clean, kind
