"""Indexer scores over stored FP4 rows: decode, prefill, candidate blocks."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from cases import Case

from burnish.kernels.attention.index_scores import Keys, ScoreTiles, index_scores
from burnish.kernels.attention.reference import index_scores_ref
from burnish.kernels.quant.reference import decode_mxfp4, encode_mxfp4, fake_mxfp4
from burnish.kernels.testing import assert_close, error_ratio

HEADS, CHANNELS, PAGE = 32, 128, 64
_CHECKED_ENTRIES = 1 << 17


def _state(seed: int, rows: int, contexts: int, entries: int, is_wide: bool, num_blocks: int | None) -> SimpleNamespace:
    generator = torch.Generator("cuda").manual_seed(seed)
    total = contexts * entries
    keys = torch.empty(total, CHANNELS // 2 + CHANNELS // 32, dtype=torch.uint8, device="cuda")
    for start in range(0, total, 1 << 20):
        part = keys[start : start + (1 << 20)]
        part.copy_(encode_mxfp4(torch.randn(len(part), CHANNELS, device="cuda", generator=generator)))
    table = torch.randperm(total // PAGE, device="cuda", generator=generator).to(torch.int32).view(contexts, -1)
    dtype = torch.float32 if is_wide else torch.bfloat16
    query = fake_mxfp4(torch.randn(rows, HEADS, CHANNELS, device="cuda", generator=generator))
    blocks = None
    if num_blocks is not None:
        order = torch.rand(rows, entries // 8, device="cuda", generator=generator).argsort(1)[:, :num_blocks]
        blocks = order.sort(1).values.to(torch.int32)
    width = entries if num_blocks is None else 8 * num_blocks
    return SimpleNamespace(
        query=query.to(dtype),
        weights=(torch.randn(rows, HEADS, device="cuda", generator=generator) / 64).to(dtype),
        keys=Keys(rows=keys, table=table, entries_per_page=PAGE),
        context=torch.arange(rows, device="cuda", dtype=torch.int32) * contexts // rows,
        # prefill rows see one entry more each
        visible=(entries - torch.arange(rows, device="cuda") % (rows // contexts)).to(torch.int32),
        entries=entries,
        blocks=blocks,
        scores=torch.empty(rows, width, dtype=dtype, device="cuda"),
        best=torch.empty(rows, width // 8, dtype=dtype, device="cuda"),
    )


def _check(state: SimpleNamespace, rounds: bool) -> str:
    row = int(torch.randint(len(state.query), (1,)))
    pages = state.keys.table[int(state.context[row])].long()
    rows = state.keys.rows.view(-1, PAGE, state.keys.rows.shape[1])[pages].flatten(0, 1)
    if state.blocks is not None:
        picked = (state.blocks[row].long().unsqueeze(1) * 8 + torch.arange(8, device="cuda")).flatten()
    else:
        picked = torch.arange(int(state.visible[row]), device="cuda")[-_CHECKED_ENTRIES:]
    keys = decode_mxfp4(rows[picked], CHANNELS)
    got = state.scores[row]
    got = got if state.blocks is not None else got[picked]
    seen = picked < state.visible[row]
    assert torch.isneginf(got[~seen]).all(), "an invisible entry has a score"
    query, weights = state.query[row : row + 1], state.weights[row : row + 1]
    if rounds:
        pad = -len(keys) % 64
        dense = torch.nn.functional.pad(keys, (0, 0, 0, pad)).bfloat16()[None]
        want = index_scores_ref(query, weights, dense, torch.zeros(1, dtype=torch.int64, device="cuda"))[0, : len(keys)]
        equal = (got.float() == want)[seen].float().mean().item()
        assert equal > 0.999, f"only {equal:.4%} of the scores have the twin's bits"
        message = f"{equal:.4%} of bits"
    else:
        want = torch.einsum("hd,nd->hn", query[0].double(), keys.double()).relu()
        want = (want * weights[0].double().unsqueeze(1)).sum(0)
        bound = 1e-6 if got.dtype == torch.float32 else 3e-3
        assert_close("scores", got[seen], want[seen], bound)
        message = f"error {error_ratio(got[seen], want[seen]):.1e}"
    if state.blocks is None:
        whole = int(state.visible[row]) // 8
        assert torch.equal(state.best[row, :whole], state.scores[row, : 8 * whole].view(-1, 8).amax(1)), "block maxima"
    return message


def score_case(
    rows: int,
    contexts: int,
    entries: int,
    *,
    goal: float | None = None,
    is_wide: bool = False,
    rounds: bool = False,
    num_blocks: int | None = None,
    tiles: ScoreTiles | None = None,
    rows_per_program: int = 1,
) -> Case:
    """One launch over `contexts` contexts of `entries` entries each."""
    options = {"rounds": rounds, "rows_per_program": rows_per_program, "block_max": num_blocks is None}
    if tiles is not None:
        options["tiles"] = tiles

    def run(state: SimpleNamespace) -> None:
        index_scores(
            state.query, state.weights, state.keys, state.context, state.visible, state.entries, blocks=state.blocks,
            out=(state.scores, state.best), **options,
        )  # fmt: skip

    per_row = entries if num_blocks is None else 8 * num_blocks
    pairs = rows * per_row
    read = contexts * entries if num_blocks is None else pairs
    kind = "fp32" if is_wide else "bf16 bits" if rounds else "bf16"
    shape = f"{rows} x {entries}" if num_blocks is None else f"{rows} x {8 * num_blocks} of {entries}"
    return Case(
        kernel="indexer scores" if num_blocks is None else "reindex scores",
        shape=f"{shape} {kind}",
        make=lambda seed: _state(seed, rows, contexts, entries, is_wide, num_blocks),
        run=run,
        outputs=lambda state: (state.scores, state.best),
        check=lambda state: _check(state, rounds),
        size_bytes=read * 68 + pairs * (4 if is_wide else 2) * 1.125,
        # the products run in FP8, at 1.7 times the bf16 rate the limit is computed with
        flops=pairs * HEADS * CHANNELS * 2 / 1.7,
        goal_us=goal,
        sets=4 if read * 68 > 1 << 28 else None,
    )


def cases() -> Iterator[Case]:
    """Lines of the table."""
    million, many = 1 << 20, 1 << 16
    yield score_case(1, 1, many)
    yield score_case(1, 1, million, goal=30.0)
    yield score_case(1, 1, million, is_wide=True)
    yield score_case(1, 1, million, rounds=True)
    yield score_case(8, 8, million)
    yield score_case(32, 32, many, goal=55.0)
    yield score_case(1024, 1, many, rows_per_program=4, goal=5500.0 / 8)
    yield score_case(1, 1, million, num_blocks=2048)
    yield score_case(32, 32, many, num_blocks=2048, goal=20.0)
    yield score_case(128, 16, many, num_blocks=2048)
