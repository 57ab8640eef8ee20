"""The exact selection against a stable sort: ties, signed zeros, short rows, every depth of the walk."""

import pytest
import torch

from burnish.kernels.attention.reference import candidate_blocks_ref, select_top_ref
from burnish.kernels.attention.select_top import SelectTiles, candidate_pool, select_top

pytestmark = pytest.mark.triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = SelectTiles(one_program=256, most_maxima=256, most_slots=16)


def expect(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    allowed = torch.arange(scores.shape[1], device=scores.device) < visible.unsqueeze(1)
    return select_top_ref(scores.float(), allowed, k).to(torch.int32)


def some_scores(num_rows: int, length: int, kind: str) -> torch.Tensor:
    torch.manual_seed(42)
    scores = torch.randn(num_rows, length)
    if kind == "ties":
        scores = scores.round()
        scores[:, ::3] = -0.0
    if kind == "holes":
        scores[torch.rand(num_rows, length) < 0.7] = -torch.inf
    if kind == "rising":  # the best entries lie side by side
        scores = torch.arange(length).expand(num_rows, -1) + scores * 0.1
    return scores.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "holes", "rising"])
@pytest.mark.parametrize("length", [40, 256, 300, 1500])
def test_selection_is_the_stable_sorts(length, kind, dtype):
    scores = some_scores(4, length, kind).to(dtype)
    visible = torch.tensor([length, length - 7, 5, 0], device=DEVICE)
    got = select_top(scores, visible, 12, tiles=SMALL)
    assert torch.equal(got, expect(scores, visible, 12))


@pytest.mark.parametrize("kind", ["plain", "ties", "holes"])
def test_many_slots_take_the_groups_of_eight(kind):
    scores = some_scores(3, 1100, kind)
    visible = torch.tensor([1100, 700, 31], device=DEVICE)
    assert torch.equal(select_top(scores, visible, 20, tiles=SMALL), expect(scores, visible, 20))


def test_equal_maxima_of_groups_go_to_the_first_groups():
    # one value everywhere, above it a few: which groups of equal maximum are walked down decides
    scores = torch.zeros(1, 2048, device=DEVICE)
    scores[0, 1999::2] = 1.0
    visible = torch.tensor([2048], device=DEVICE)
    assert torch.equal(select_top(scores, visible, 16, tiles=SMALL), expect(scores, visible, 16))
    assert torch.equal(select_top(scores, visible, 32, tiles=SMALL), expect(scores, visible, 32))


@pytest.mark.parametrize("length", [300, 1500])
def test_what_scratch_memory_held_before_does_not_matter(length, monkeypatch):
    scores = some_scores(4, length, "ties").bfloat16()
    visible = torch.tensor([length, length - 7, 5, 0], device=DEVICE)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # a place that looks right
    assert torch.equal(select_top(scores, visible, 12, tiles=SMALL), expect(scores, visible, 12))


def test_fewer_slots_than_a_power_of_two_and_infinite_scores():
    scores = some_scores(2, 100, "plain")
    scores[:, 17] = torch.inf
    visible = torch.tensor([100, 18], device=DEVICE)
    assert torch.equal(select_top(scores, visible, 5, tiles=SMALL), expect(scores, visible, 5))


def test_columns_of_candidate_blocks_become_entries():
    scores = some_scores(2, 32, "ties")
    blocks = torch.tensor([[1, 4, 6, 11], [0, 2, 9, -1]], dtype=torch.int32, device=DEVICE)
    scores[1, 24:] = -torch.inf
    visible = torch.tensor([32, 32], device=DEVICE)
    got = select_top(scores, visible, 6, blocks=blocks)
    want = expect(scores, visible, 6).long()
    entries = blocks.long().gather(1, want.clamp_min(0) // 8) * 8 + want % 8
    assert torch.equal(got.long(), entries)


def test_candidate_pool_is_the_twins():
    torch.manual_seed(42)
    scores = torch.randn(3, 160, device=DEVICE)
    visible = torch.tensor([160, 77, 3], device=DEVICE)
    best = torch.full((3, 20), -torch.inf, device=DEVICE)
    for row, length in enumerate(visible.tolist()):
        for block in range(-(-length // 8)):
            best[row, block] = scores[row, block * 8 : min(length, block * 8 + 8)].max()
        best[row, (length - 1) // 8] = torch.inf
    got = candidate_pool(best, visible, 6)
    want = candidate_blocks_ref(scores, visible, 8, 6)
    for row in range(3):
        assert [b for b in got[row].tolist() if b >= 0] == want[row].nonzero().flatten().tolist()


def test_too_many_columns_are_named():
    with pytest.raises(ValueError, match=r"select_top: 4096 columns with k=60 have 512 group maxima, more than 256"):
        select_top(torch.zeros(1, 4096, device=DEVICE), torch.ones(1, device=DEVICE), 60, tiles=SMALL)
