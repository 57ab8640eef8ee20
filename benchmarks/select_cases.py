"""Exact top-k with ties to the lower index, and the candidate pool."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from cases import Case

from burnish.kernels.attention.select_top import SelectTiles, select_top

_MILLION = 1 << 20


def select_case(
    rows: int, length: int, k: int, dtype: torch.dtype, goal: float | None, tiles: SelectTiles | None = None
) -> Case:
    """Rows of normal scores; bf16 ones have many ties."""

    def make(seed: int) -> SimpleNamespace:
        generator = torch.Generator("cuda").manual_seed(seed)
        return SimpleNamespace(
            scores=torch.randn(rows, length, device="cuda", generator=generator).to(dtype),
            visible=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
            out=torch.empty(rows, k, dtype=torch.int32, device="cuda"),
        )

    def run(state: SimpleNamespace) -> None:
        select_top(state.scores, state.visible, k, out=state.out, **({"tiles": tiles} if tiles else {}))

    def check(state: SimpleNamespace) -> str:
        for row in range(0, rows, max(1, rows // 4)):
            order = state.scores[row].float().sort(descending=True, stable=True).indices[:k].sort().values
            assert torch.equal(state.out[row].long(), order), f"row {row} is not the stable sort's"
        return "exact"

    size = torch.empty((), dtype=dtype).element_size()
    return Case(
        kernel=f"top-{k}", shape=f"{rows} x {length} {str(dtype).removeprefix('torch.')}", make=make, run=run,
        outputs=lambda state: (state.out,), check=check, size_bytes=rows * (length * size + 4 * k),
        baseline=lambda state: torch.topk(state.scores, k, dim=1), goal_us=goal,
        sets=max(4, min(64, (200 << 20) // (rows * length * size) + 1)),
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """Lines of the table."""
    goals = {(1, 16384): 7.0, (32, 16384): 7.0, (128, 16384): 7.0}
    goals |= {(1, _MILLION): 20.0, (32, _MILLION): 80.0, (128, _MILLION): 142.0}
    for dtype in (torch.float32, torch.bfloat16):
        for length in (16384, 65536, _MILLION):
            for rows in (1, 32, 128):
                yield select_case(rows, length, 512, dtype, goals.get((rows, length)))
    for rows in (1, 32):
        yield select_case(rows, _MILLION // 8, 2048, torch.bfloat16, None)
