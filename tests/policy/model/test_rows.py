"""Rows, chains and narrowing: what the trainer lays out equals what the engine would have run."""

import pytest
import torch

from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.rows import build_rows, plain_rows

WINDOW, NUM_DECODER = 8, 4  # of the fixture's model: layers 4..7 are the decoder half
HALO = WINDOW + (NUM_DECODER - 1) * (WINDOW - 1)


def tokens(length, seed=42):
    return torch.randint(5, 115, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def forward(model, rows, store=None):
    with torch.no_grad():
        return model(rows, store or GraphStore(model.config, rows), deterministic=True).hidden


def narrowed(ids, keep):
    """One cold prefill whose decoder half runs on the last `keep` rows, on a chain that starts there."""
    length = len(ids)
    start = length - keep
    return build_rows(ids, range(length), [0] * length, decoder_rows=range(start, length), decoder_floor=[start] * keep)


# ---- windows ------------------------------------------------------------------------------------------------------


def test_every_window_slot_is_a_row_of_its_own_chain_at_or_above_the_floor(core_config):
    """Against the definition, over random layouts of chains, floors and row orders."""
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(20):
        flat = []
        for chain in range(draw(1, 5)):
            floor, length = (0, draw(1, 40)) if chain == 0 else (draw(0, 30), draw(1, 30))
            flat += [(chain, floor, p) for p in range(floor, floor + length)]
        order = torch.randperm(len(flat), generator=generator).tolist()
        flat = [flat[i] for i in order]
        chains, floors, positions = (list(column) for column in zip(*flat, strict=True))
        # contexts 1.. write nothing: their entries belong to other tests, here only the windows are read
        rows = build_rows(
            [5] * len(flat), positions, [0] * len(flat), writes_global=[chain == 0 for chain in chains],
            encoder_chain=chains, encoder_floor=floors, decoder_chain=chains, decoder_floor=floors,
        )  # fmt: skip
        rows.live[: len(flat)] &= rows.writes_global[: len(flat)]  # nor do they select
        own = torch.arange(len(rows), dtype=torch.float32).unsqueeze(1)
        for layer in (0, 7):
            keys, valid = GraphStore(core_config, rows).window(layer, own)
            for row, (chain, floor, position) in enumerate(flat):
                for slot in range(WINDOW):
                    wanted = position - WINDOW + 1 + slot
                    assert bool(valid[row, slot]) == (wanted >= floor)
                    if wanted >= floor:
                        source = int(keys[row, slot, 0])
                        assert flat[source] == (chain, floor, wanted)
            assert not valid[len(flat) :].any()


# ---- narrowing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "keep"), [(1, 1), (5, 5), (8, 8)])
def test_a_prompt_within_the_window_is_narrowed_exactly(core, length, keep):
    ids = tokens(length)
    whole = forward(core, plain_rows([ids]))
    assert torch.equal(forward(core, narrowed(ids, keep))[:keep], whole[length - keep : length])


@pytest.mark.parametrize("length", [40, 48, 57])  # 48: a whole number of tiles, so padding rows must be made
def test_the_halo_gives_the_exact_last_row_and_less_does_not(core, length):
    ids = tokens(length)
    last = forward(core, plain_rows([ids]))[length - 1]
    assert torch.equal(forward(core, narrowed(ids, HALO))[HALO - 1], last)
    assert torch.equal(forward(core, narrowed(ids, HALO + 3))[HALO + 2], last)
    for keep in (1, WINDOW, 2 * WINDOW):
        assert not torch.equal(forward(core, narrowed(ids, keep))[keep - 1], last), keep


def test_the_halo_is_not_one_row_too_wide(core):
    """The last logits reach back through the cut layer's output at the halo's row W-1, whose window ends at its row 0."""
    ids = tokens(48)
    for keep in (HALO, HALO + 1):
        rows, streams = narrowed(ids, keep), []
        hook = core.layers[4].register_forward_hook(lambda m, a, out, into=streams: into.append(out[0].streams))
        out = core(rows, GraphStore(core.config, rows), deterministic=True)
        hook.remove()
        grad = torch.autograd.grad(out.hidden[keep - 1].sum(), streams[0])[0].abs().sum((1, 2))
        oldest = keep - HALO + WINDOW - 1
        assert grad[oldest] > 0
        assert (grad[:oldest] == 0).all()


def test_narrowing_leaves_encoder_and_entries_as_they_are(core):
    ids = tokens(40)
    plain, some = plain_rows([ids]), narrowed(ids, 8)
    stores = [GraphStore(core.config, rows) for rows in (plain, some)]
    for rows, store in zip((plain, some), stores, strict=True):
        forward(core, rows, store)
    for layer in (2, 4):
        assert torch.equal(stores[0]._main[layer], stores[1]._main[layer])
        assert torch.equal(stores[0]._index_keys[layer], stores[1]._index_keys[layer])


def test_decoder_halves_of_equal_padded_length_are_told_apart(core):
    """20 of 30 rows pad to 32 as 30 do; the narrowed half still runs on its own rows, in any order."""
    ids = tokens(30)
    rows = narrowed(ids, 20)
    assert len(rows) == len(rows.decoder.index) == 32
    assert not rows.decoder_is_all
    assert plain_rows([ids]).decoder_is_all
    backwards = build_rows(
        ids, range(30), [0] * 30, decoder_rows=range(29, 9, -1), decoder_floor=[10] * 20
    )  # fmt: skip
    assert torch.equal(forward(core, rows)[:20], forward(core, backwards)[:20].flip(0))


def test_decode_rows_go_on_with_the_chain_of_a_narrowed_prefill(core):
    """Prompt 30 narrowed to its last 8 rows, then 10 decode rows; a second, unrelated context changes no bit."""
    ids, other = tokens(40), tokens(21, 3)
    keep = range(22, 40)
    alone = build_rows(ids, range(40), [0] * 40, decoder_rows=keep, decoder_floor=[22] * 18)
    mixed = build_rows(
        other + ids, [*range(21), *range(40)], [0] * 21 + [1] * 40,
        decoder_rows=[*range(21), *(21 + row for row in keep)], decoder_floor=[0] * 21 + [22] * 18,
    )  # fmt: skip
    hidden = forward(core, alone)[:18]
    assert torch.equal(forward(core, mixed)[21 : 21 + 18], hidden)
    assert torch.equal(forward(core, mixed)[:21], forward(core, plain_rows([other]))[:21])
    # from W rows above the floor on, layer 4's windows are whole, but what lies in them is still narrowed
    assert not torch.equal(hidden[-1], forward(core, plain_rows([ids]))[39])


# ---- bounded replay -----------------------------------------------------------------------------------------------


def replayed(ids, hit, *, decoder_all=True):
    """First chain: rows [0, hit). Second: replay rows [max(0, hit-W), hit), which write nothing, then the rest."""
    start, length = max(0, hit - WINDOW), len(ids)
    positions = [*range(hit), *range(start, length)]
    second = len(positions) - hit
    chain, floor = [0] * hit + [1] * second, [0] * hit + [start] * second
    rows = build_rows(
        [ids[p] for p in positions], positions, [0] * len(positions),
        writes_global=[True] * hit + [p >= hit for p in positions[hit:]],
        encoder_chain=chain, encoder_floor=floor, decoder_chain=chain, decoder_floor=floor,
    )  # fmt: skip
    return rows, hit - start


@pytest.mark.parametrize("hit", [1, 2, 5, 7, 8])
def test_a_bounded_hit_within_the_window_is_the_cold_prefill(core, hit):
    ids = tokens(33)
    cold = forward(core, plain_rows([ids]))[:33]
    rows, num_replayed = replayed(ids, hit)
    hidden = forward(core, rows)
    assert torch.equal(hidden[:hit], cold[:hit])
    assert torch.equal(hidden[hit : hit + num_replayed], cold[hit - num_replayed : hit])
    assert torch.equal(hidden[hit + num_replayed : hit + num_replayed + 33 - hit], cold[hit:])


@pytest.mark.parametrize("hit", [15, 20, 31])
def test_a_longer_hit_differs_and_keeps_every_entry_below_it(core, hit):
    ids = tokens(40)
    plain = plain_rows([ids])
    cold_store = GraphStore(core.config, plain)
    cold = forward(core, plain, cold_store)[:40]
    rows, num_replayed = replayed(ids, hit)
    assert num_replayed == WINDOW
    store = GraphStore(core.config, rows)
    hidden = forward(core, rows, store)
    assert torch.equal(hidden[:hit], cold[:hit])
    assert not torch.equal(hidden[hit : hit + WINDOW], cold[hit - WINDOW : hit])
    assert not torch.equal(hidden[hit + WINDOW], cold[hit])
    for layer, ratio in ((2, 2), (4, 1)):
        below = hit // ratio
        for got, want in ((store._main, cold_store._main), (store._index_keys, cold_store._index_keys)):
            got, want = (tables[layer].reshape(-1, tables[layer].shape[-1]) for tables in (got, want))
            assert torch.equal(got[:below], want[:below])
            assert not torch.equal(got[below : 40 // ratio], want[below : 40 // ratio])


@pytest.mark.parametrize("hit", [15, 16])
def test_the_pair_across_an_odd_floor_takes_its_first_half_from_the_replay_row(core, hit):
    class Watched(GraphStore):
        def complete_groups(self, layer, value, gate):
            stacked = super().complete_groups(layer, value, gate)
            if layer == 2:
                self.seen = (value, stacked[0], stacked[2])
            return stacked

    rows, num_replayed = replayed(tokens(40), hit)
    store = Watched(core.config, rows)
    forward(core, rows, store)
    value, stacked, position = store.seen
    first = hit - hit % 2
    pair = int(torch.nonzero(position == first))
    replay_row, suffix_row = hit + num_replayed - 1, hit + num_replayed
    if hit % 2:
        assert torch.equal(stacked[pair], value[[replay_row, suffix_row]])
        assert not torch.equal(stacked[pair, 0], value[hit - 1])  # the first chain's row at the same position
    else:
        assert torch.equal(stacked[pair], value[[suffix_row, suffix_row + 1]])
    assert torch.equal(stacked[position < first], value[:first].unflatten(0, (-1, 2)))


def test_gradients_below_the_floor_reach_the_first_chain_only_through_entries(core):
    """The suffix sees the first chain's entries, never its windows; replay rows carry gradient too."""
    ids = list(range(5, 45))
    rows, num_replayed = replayed(ids, 20)
    streams = None

    def leaf(module, args):
        nonlocal streams
        streams = args[0].streams.detach().requires_grad_()
        args[0].streams = streams
        return args

    hook = core.layers[0].register_forward_pre_hook(leaf)
    out = core(rows, GraphStore(core.config, rows), deterministic=True)
    hook.remove()
    grad = torch.autograd.grad(out.hidden[20 + num_replayed].sum(), streams)[0].abs().sum((1, 2))
    assert (grad[:20] > 0).sum() >= 4  # selected entries of the first chain
    assert (grad[20 : 20 + num_replayed + 1] > 0).all()
    assert (grad[20 + num_replayed + 1 :] == 0).all()
    store = GraphStore(core.config, rows)
    for layer in (0, 7):
        keys, valid = store.window(layer, torch.arange(len(rows), dtype=torch.float32).unsqueeze(1))
        suffix = slice(20, 60 - (20 - num_replayed))
        assert (keys[suffix][valid[suffix]] >= 20).all()


# ---- mistakes -----------------------------------------------------------------------------------------------------


def test_holes_and_doubled_positions_are_named(core_config):
    def store(**layout):
        return GraphStore(core_config, build_rows(**layout))

    with pytest.raises(ValueError, match=r"encoder chain 0 has no row at position 3, which a row reads"):
        store(token_id=[5] * 5, position=[0, 1, 2, 4, 5], context=[0] * 5)
    with pytest.raises(
        ValueError, match=r"encoder chain 2 has position 4 twice; a replayed or later row needs a chain"
    ):
        store(token_id=[5] * 6, position=[0, 1, 2, 3, 4, 4], context=[0] * 6, encoder_chain=[2] * 6)
    with pytest.raises(ValueError, match=r"decoder chain 0 has no row at position 4, which a row reads"):
        store(token_id=[5] * 6, position=range(6), context=[0] * 6, decoder_rows=[3, 5], decoder_floor=[3, 3])
    with pytest.raises(ValueError, match=r"one entry is written by two rows"):
        store(token_id=[5] * 4, position=[0, 1, 0, 1], context=[0] * 4, encoder_chain=[0, 0, 1, 1],
              decoder_chain=[0, 0, 1, 1])  # fmt: skip
    with pytest.raises(ValueError, match=r"encoder chain 1 has no row at position 8, which a row reads"):
        # a resident hit of 9 on a new chain: the pair (8, 9) needs the row at 8
        store(token_id=[5] * 12, position=range(12), context=[0] * 12, encoder_chain=[0] * 9 + [1] * 3,
              encoder_floor=[0] * 9 + [9] * 3, decoder_chain=[0] * 9 + [1] * 3, decoder_floor=[0] * 9 + [9] * 3)  # fmt: skip
    with pytest.raises(
        ValueError, match=r"context 1 has no row that writes the entry closed at position 3 \(ratio 1\)"
    ):
        store(token_id=[5] * 10, position=[*range(4), *range(6)], context=[0] * 4 + [1] * 6,
              writes_global=[True] * 4 + [True, True, True, False, True, True])  # fmt: skip


def test_wrong_columns_are_named():
    ids = {"token_id": [5, 6], "position": [0, 1], "context": [0, 0]}
    with pytest.raises(ValueError, match="position has 1 values, token_id has 2"):
        build_rows(**{**ids, "position": [0]})
    with pytest.raises(ValueError, match="writes_global has 3 values, token_id has 2"):
        build_rows(**ids, writes_global=[True] * 3)
    with pytest.raises(ValueError, match="decoder_floor has 2 values, the decoder half has 1 rows"):
        build_rows(**ids, decoder_rows=[1], decoder_floor=[0, 0])
    with pytest.raises(ValueError, match="decoder_rows names row 2, there are 2"):
        build_rows(**ids, decoder_rows=[2])
    with pytest.raises(ValueError, match="names a row twice"):
        build_rows(**ids, decoder_rows=[1, 1])


def test_rows_move_together():
    rows = narrowed(tokens(20), 5)
    moved = rows.to("meta")
    assert {t.device.type for t in (moved.token_id, moved.live, moved.encoder.chain, moved.decoder.index)} == {"meta"}
    assert len(moved) == len(rows)
