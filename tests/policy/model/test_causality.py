"""What a row may depend on: the past of its own context, and nothing else, in every layer mode."""

import pytest
import torch

from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.rows import build_rows, plain_rows

LENGTH = 60  # 60 entries of ratio 1 against a pool of 12 and a top-k of 6


def run(model, contexts, *, deterministic=True):
    rows = plain_rows(contexts)
    with torch.no_grad():
        return model(rows, GraphStore(model.config, rows), deterministic=deterministic, capture=True)


def tokens(length, seed=42):
    return torch.randint(5, 115, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def plain_run(core):
    return run(core, [tokens(LENGTH)])


def test_selection_and_pool_are_really_restricted(core, plain_run):
    pool = plain_run.captures["candidate_blocks.4"][LENGTH - 1]
    assert pool.sum() == 3
    assert pool[(LENGTH - 1) // 4]
    assert not torch.equal(
        plain_run.captures["topk_indices.4"][LENGTH - 1], plain_run.captures["topk_indices.6"][LENGTH - 1]
    )
    chosen = plain_run.captures["topk_indices.6"][LENGTH - 1]
    assert pool[chosen // 4].all()
    assert len(chosen.unique()) == 6


@pytest.mark.parametrize("changed", [1, 7, 8, 23, 40, 41, LENGTH - 1])
def test_a_token_changes_nothing_before_it(core, plain_run, changed):
    """Odd positions close a pair of the ratio-2 cache: the first token's query must not see it."""
    ids = tokens(LENGTH)
    ids[changed] = (ids[changed] + 50) % 110 + 5
    again = run(core, [ids])
    assert torch.equal(again.hidden[:changed], plain_run.hidden[:changed])
    assert not torch.equal(again.hidden[changed], plain_run.hidden[changed])
    for name, before in plain_run.captures.items():
        assert torch.equal(again.captures[name][:changed], before[:changed]), name
    for before, after in zip(plain_run.experts, again.experts, strict=True):
        assert torch.equal(after[:changed], before[:changed])


@pytest.mark.parametrize("row", [6, 23, 38])
def test_no_gradient_comes_from_the_future(core, row):
    embed = core.embed.weight.detach().clone().requires_grad_()
    rows = plain_rows([list(range(5, 5 + LENGTH))])  # every position has an embedding of its own
    out = torch.func.functional_call(
        core, {"embed.weight": embed}, (rows, GraphStore(core.config, rows)), {"deterministic": True}
    )
    out.hidden[row].sum().backward()
    reached = embed.grad.abs().sum(1)[5 : 5 + LENGTH] > 0
    assert not reached[row + 1 :].any()
    assert reached[max(0, row - 7) : row + 1].all()


def test_packed_contexts_are_the_separate_ones(core):
    contexts = [tokens(LENGTH, 1), tokens(1, 2), tokens(17, 3), tokens(33, 4)]
    packed = run(core, contexts).hidden
    place = 0
    for ids in contexts:
        alone = run(core, [ids]).hidden[: len(ids)]
        assert torch.equal(packed[place : place + len(ids)], alone)
        place += len(ids)


def test_plain_products_agree_within_rounding(core):
    contexts = [tokens(20, 1), tokens(33, 4)]
    exact, plain = run(core, contexts).hidden[:53], run(core, contexts, deterministic=False).hidden[:53]
    # sums in another order may move one value across an FP4 or FP8 bin: most rows are close, none is far
    error = (exact - plain).square().mean(1).sqrt()
    assert error.median() < 1e-5
    assert error.max() < 0.3


def test_bits_of_a_row_do_not_depend_on_batch_order_or_padding(core):
    """Any mixture of rows, interleaved at random, gives each row the bits that its context gives alone."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3, 14, 16, 31, 47, 60]
    contexts = [tokens(length, 10 + i) for i, length in enumerate(lengths)]
    alone = [run(core, [ids]).hidden for ids in contexts]
    for trial in range(6):
        count = int(torch.randint(2, 6, (), generator=generator))
        members = torch.randperm(len(contexts), generator=generator)[:count].tolist()
        flat = [(slot, p) for slot, member in enumerate(members) for p in range(lengths[member])]
        order = torch.randperm(len(flat), generator=generator).tolist() if trial else range(len(flat))
        flat = [flat[i] for i in order]
        rows = build_rows(
            [contexts[members[slot]][p] for slot, p in flat], [p for _, p in flat], [slot for slot, _ in flat]
        )
        with torch.no_grad():
            hidden = core(rows, GraphStore(core.config, rows), deterministic=True).hidden
        want = torch.stack([alone[members[slot]][p] for slot, p in flat])
        assert torch.equal(hidden[: len(flat)], want)
        assert torch.equal(hidden[len(flat) :].isfinite(), torch.ones_like(hidden[len(flat) :], dtype=torch.bool))


def test_rows_that_are_not_padded_are_refused_in_deterministic_mode(core):
    rows = plain_rows([tokens(5)], pad=False)
    with pytest.raises(ValueError, match=r"multiples of 16, got 5 and 5"):
        core(rows, GraphStore(core.config, rows), deterministic=True)
