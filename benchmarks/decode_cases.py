"""Sparse decode attention over FP4 main rows and FP8 window rows, from one query to many."""

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace

import torch
from cases import Case

from burnish.kernels.attention.decode import Shape, decode_attention, decode_attention_ref, plan
from burnish.kernels.attention.reference import sink_attention_ref
from burnish.kernels.quant.read import read_rows
from burnish.kernels.quant.write import write_rows
from burnish.kernels.testing import assert_close

_HEADS, _CHANNELS, _WINDOW, _SELECTED = 64, 512, 128, 512
_SCALE = _CHANNELS**-0.5
_CHECKED = 64
"""Query rows held to fp64."""
GOALS = {1: 10.0, 32: 22.0, 64: 30.0, 128: 40.0}


@cache
def _table(form: str, rows: int) -> torch.Tensor:
    """Random rows of one form, shared by all input sets."""
    generator = torch.Generator("cuda").manual_seed(rows)
    bytes_a_row = {"fp8": 528, "nvfp4": 288}[form]
    table = torch.empty(rows, bytes_a_row, dtype=torch.uint8, device="cuda")
    for start in range(0, rows, 65536):
        block = table[start : start + 65536]
        write_rows(torch.randn(len(block), _CHANNELS, device="cuda", generator=generator).bfloat16(), block, form)
    return table


@cache
def _values(form: str, rows: int) -> torch.Tensor:
    """The same rows in bf16: the cache of the torch baseline."""
    return read_rows(_table(form, rows), form, _CHANNELS, dtype=torch.bfloat16)


def _make(seed: int, batch: int, entries: int) -> SimpleNamespace:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(high: int, count: int) -> torch.Tensor:
        return torch.randint(0, high, (batch, count), device="cuda", generator=generator, dtype=torch.int32)

    shape = (batch, _HEADS, _CHANNELS)
    # every request has 128 neighbouring places of the ring
    start = draw(max(1, 262144 // _WINDOW), 1) * _WINDOW
    return SimpleNamespace(
        q=torch.randn(shape, device="cuda", generator=generator).bfloat16(),
        window=start + torch.arange(_WINDOW, device="cuda", dtype=torch.int32),
        selected=draw(entries, _SELECTED).sort(1).values,
        sink=torch.randn(_HEADS, device="cuda", generator=generator),
        out=torch.empty(shape, dtype=torch.bfloat16, device="cuda"),
    )


def decode_case(
    batch: int,
    entries: int,
    shape: Callable[[int, int], Shape] | Shape | None = None,
    label: str = "",
    baseline: bool = True,
) -> Case:
    """One line: `batch` query rows over a table of `entries`."""

    def arguments(state: SimpleNamespace) -> tuple:
        return (
            state.q, _table("fp8", 262144), state.window, _table("nvfp4", entries), state.selected, state.sink, _SCALE,
        )  # fmt: skip

    def run(state: SimpleNamespace) -> None:
        decode_attention(*arguments(state), out=state.out, shape=shape)

    def check(state: SimpleNamespace) -> str:
        picked = torch.randperm(batch, device="cuda")[:_CHECKED]
        q, ring, window, table, selected, sink, scale = arguments(state)
        want = decode_attention_ref(q[picked].double(), ring, window[picked], table, selected[picked], sink, scale)
        assert torch.isfinite(state.out).all(), "not every output is finite"
        assert_close("out", state.out[picked], want, 6e-3)
        from burnish.kernels.testing import error_ratio

        return f"error {error_ratio(state.out[picked], want):.1e}"

    def torch_form(state: SimpleNamespace) -> torch.Tensor:
        main, ring = _values("nvfp4", entries), _values("fp8", 262144)
        keys = torch.cat((ring[state.window], main[state.selected]), 1)
        valid = torch.ones(keys.shape[:2], dtype=torch.bool, device="cuda")
        return sink_attention_ref(state.q, keys, valid, state.sink, _SCALE)

    keys = _WINDOW + _SELECTED
    return Case(
        kernel=f"attention/decode{label}",
        shape=f"B={batch}, {entries} entries",
        make=lambda seed: _make(seed, batch, entries),
        run=run,
        outputs=lambda state: (state.out,),
        check=check,
        size_bytes=batch * (_SELECTED * 288 + _WINDOW * 528 + 4 * keys + 4 * _HEADS * _CHANNELS),
        flops=4.0 * batch * keys * _HEADS * _CHANNELS,
        baseline=torch_form if baseline else None,
        goal_us=GOALS.get(batch),
    )


def cases() -> Iterator[Case]:
    """Lines of the table: the form that is chosen by itself, and the other two beside it."""
    for batch in (1, 32, 64, 128, 2048):
        yield decode_case(batch, 1 << 20)
    yield decode_case(128, 65536)
    for batch in (1, 32, 128):
        yield decode_case(batch, 1 << 20, plan(batch, _WINDOW + _SELECTED), "_plain", False)
    for batch in (1, 32, 64, 128, 2048):
        yield decode_case(batch, 1 << 20, plan(batch, _WINDOW + _SELECTED, "staged"), "_staged", False)
