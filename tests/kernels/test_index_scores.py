"""Indexer scores from stored rows against the twin: pages, contexts, candidate blocks, block maxima, extreme scales."""

import pytest
import torch

from burnish.kernels.attention.index_scores import Keys, ScoreTiles, index_scores
from burnish.kernels.attention.reference import candidate_blocks_ref, index_scores_ref
from burnish.kernels.quant.reference import decode_mxfp4, encode_mxfp4, fake_mxfp4
from burnish.kernels.testing import assert_close

pytestmark = pytest.mark.triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = ScoreTiles(block_k=64, programs_per_processor=1)


def make_keys(contexts: int, pages: int, channels: int, per_page: int, spread: float = 1.0) -> Keys:
    """Random rows on shuffled pages; channel groups of different sizes."""
    torch.manual_seed(42)
    size = torch.logspace(-spread, spread, channels // 32).repeat_interleave(32)
    rows = encode_mxfp4(torch.randn(contexts * pages * per_page, channels) * size)
    table = torch.randperm(contexts * pages).to(torch.int32).view(contexts, pages)
    return Keys(rows=rows.to(DEVICE), table=table.to(DEVICE), entries_per_page=per_page)


def dense(keys: Keys, channels: int) -> torch.Tensor:
    """[contexts, T, C] fp32, T padded to the twin's 64."""
    pages = decode_mxfp4(keys.rows, channels).view(-1, keys.entries_per_page, channels)
    out = pages[keys.table.long()].flatten(1, 2)
    return torch.nn.functional.pad(out, (0, 0, 0, -out.shape[1] % 64))


def make_query(num_rows: int, heads: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    size = torch.logspace(-1, 1, channels // 32).repeat_interleave(32)
    query = fake_mxfp4(torch.randn(num_rows, heads, channels) * size)
    query[0, 0] = 0
    return query.to(DEVICE), torch.randn(num_rows, heads).to(DEVICE)


@pytest.mark.parametrize(("heads", "channels", "per_page"), [(4, 32, 64), (8, 64, 32), (32, 128, 64)])
def test_scores_match_the_twin_entry_by_entry(heads, channels, per_page):
    keys = make_keys(2, 4, channels, per_page)
    query, weights = make_query(3, heads, channels)
    context, visible = torch.tensor([1, 0, 1], device=DEVICE), torch.tensor([per_page * 4, 70, 1], device=DEVICE)
    got, _ = index_scores(query, weights, keys, context, visible, per_page * 4, tiles=TILES)
    want = index_scores_ref(query, weights, dense(keys, channels), context)
    for row, length in enumerate(visible.tolist()):
        assert_close(f"row {row}", got[row, :length], want[row, :length], 1e-6)
        edge = min(got.shape[1], -(-length // 64) * 64)
        assert torch.isneginf(got[row, length:edge]).all()


def test_rows_of_one_context_share_the_keys_they_read():
    keys = make_keys(2, 3, 64, 64)
    query, weights = make_query(4, 16, 64)
    context, visible = torch.tensor([1, 1, 0, 0], device=DEVICE), torch.tensor([130, 131, 5, 192], device=DEVICE)
    alone, _ = index_scores(query, weights, keys, context, visible, 192, tiles=TILES)
    shared, _ = index_scores(query, weights, keys, context, visible, 192, tiles=TILES, rows_per_program=2)
    for row, length in enumerate(visible.tolist()):
        assert torch.equal(alone[row, :length], shared[row, :length])


def test_block_maxima_give_the_twins_candidate_pool():
    keys = make_keys(1, 4, 32, 32)
    query, weights = make_query(3, 4, 32)
    context, visible = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.tensor([101, 128, 9], device=DEVICE)
    scores, best = index_scores(
        query, weights, keys, context, visible, 128, block_max=True, pin_newest=True, tiles=TILES
    )
    for row, length in enumerate(visible.tolist()):
        num_blocks = -(-length // 8)
        for block in range(num_blocks - 1):
            assert best[row, block] == scores[row, block * 8 : block * 8 + 8].max()
        assert torch.isposinf(best[row, num_blocks - 1])
        pool = candidate_blocks_ref(scores[row : row + 1, :length], visible[row : row + 1], 8, 5)[0]
        kept = best[row, :num_blocks].sort(descending=True, stable=True).indices[:5]
        assert sorted(kept.tolist()) == pool.nonzero().flatten().tolist()


def test_candidate_blocks_are_scored_as_the_whole_range_is():
    keys = make_keys(2, 4, 64, 32)
    query, weights = make_query(2, 8, 64)
    context, visible = torch.tensor([1, 0], device=DEVICE), torch.tensor([125, 60], device=DEVICE)
    whole, _ = index_scores(query, weights, keys, context, visible, 128, tiles=TILES)
    blocks = torch.tensor([[0, 3, 4, 9, 15], [2, 7, -1, -1, -1]], dtype=torch.int32, device=DEVICE)
    got, _ = index_scores(query, weights, keys, context, visible, 0, blocks=blocks, tiles=TILES)
    assert got.shape == (2, 40)
    for row in range(2):
        for place, block in enumerate(blocks[row].tolist()):
            for j in range(8):
                entry = block * 8 + j
                want = whole[row, entry] if block >= 0 and entry < visible[row] else torch.tensor(-torch.inf)
                assert got[row, place * 8 + j] == want


def test_group_scales_far_apart_stay_exact():
    # 2^13 between the groups of one head, 2^20 between those of a key
    keys = make_keys(1, 1, 64, 64, spread=3.0)
    query, weights = make_query(1, 16, 64)
    query[..., :32] = fake_mxfp4(query[..., :32] * 2.0**-10)
    context, visible = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.tensor([64], device=DEVICE)
    got, _ = index_scores(query, weights, keys, context, visible, 64, tiles=TILES)
    want = index_scores_ref(query.double(), weights.double(), dense(keys, 64).double(), context)
    assert_close("far apart", got, want, 1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no inline assembly")
def test_assembly_and_plain_form_give_the_same_bits():
    keys = make_keys(1, 8, 128, 64)
    query, weights = make_query(2, 32, 128)
    context, visible = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.tensor([512, 300], device=DEVICE)
    forms = [
        index_scores(query, weights, keys, context, visible, 512, tiles=ScoreTiles(asm=asm))[0] for asm in (False, True)
    ]
    for row, length in enumerate(visible.tolist()):
        assert torch.equal(forms[0][row, :length], forms[1][row, :length])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no bf16 arithmetic")
def test_rounded_scores_have_the_bits_of_a_bf16_model():
    keys = make_keys(1, 8, 128, 64)
    query, weights = make_query(2, 32, 128)
    query, weights = query.bfloat16(), weights.bfloat16()
    context, visible = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.tensor([512, 512], device=DEVICE)
    got, _ = index_scores(query, weights, keys, context, visible, 512, rounds=True)
    want = index_scores_ref(query, weights, dense(keys, 128).bfloat16(), context)
    assert (got.float() == want).float().mean() > 0.999


def test_wrong_rows_are_named():
    keys = make_keys(1, 1, 64, 64)
    query, weights = make_query(1, 4, 32)
    with pytest.raises(ValueError, match=r"rows must be contiguous uint8 \[N, 17\] for 32 channels"):
        index_scores(query, weights, keys, torch.zeros(1), torch.ones(1), 64)
