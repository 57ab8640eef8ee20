"""Rows of the caches: written from activations (norm, rotation, rounding, scatter in one kernel) and read back."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from cases import Case

from burnish.kernels.ced.entries import write_entries
from burnish.kernels.ced.reference import write_entries_ref
from burnish.kernels.quant.read import read_rows
from burnish.kernels.quant.reference import decode_mxfp4, read_rows_ref, row_bytes, write_rows_ref
from burnish.kernels.quant.write import write_rows
from burnish.kernels.testing import POISON_BYTE, assert_bits

_TURNED = 32
_EPS = 1e-20
_CPU_ROWS = 16384
"""Rows that the twin checks on the CPU, drawn from all."""


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=generator).bfloat16()


def _activations(seed: int, rows: int, channels: int) -> SimpleNamespace:
    generator = torch.Generator("cuda").manual_seed(seed)
    angle = torch.randint(0, 1 << 20, (rows, 1), device="cuda", generator=generator) * torch.logspace(
        0, -4, _TURNED, device="cuda"
    )
    return SimpleNamespace(
        generator=generator,
        x=_normal(generator, rows, channels) * 3,
        norm=1 + 0.1 * _normal(generator, channels),
        rotation=torch.polar(torch.ones_like(angle), angle),
        slots=torch.randperm(rows, device="cuda", generator=generator),
    )


def _write_state(seed: int, rows: int, channels: int, form: str) -> SimpleNamespace:
    state = _activations(seed, rows, channels)
    state.table = torch.empty(rows, row_bytes(form, channels), dtype=torch.uint8, device="cuda")
    return state


def _options(state: SimpleNamespace, is_fused: bool) -> dict:
    return {"norm": state.norm, "eps": _EPS, "rotation": state.rotation} if is_fused else {}


def _on_cpu(options: dict, picked: torch.Tensor) -> dict:
    """The same arguments for some of the rows."""
    return {
        name: value[picked].cpu() if name == "rotation" else value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


def _picked(rows: int) -> torch.Tensor:
    return torch.randperm(rows, device="cuda")[:_CPU_ROWS].sort().values


def _write_case(name: str, form: str, rows: int, channels: int, is_fused: bool, goal: float | None) -> Case:
    def run(state: SimpleNamespace) -> None:
        write_rows(state.x, state.table, form, slots=state.slots, **_options(state, is_fused))

    def baseline(state: SimpleNamespace) -> None:
        write_rows_ref(state.x, state.table, form, slots=state.slots, **_options(state, is_fused))

    def check(state: SimpleNamespace) -> str:
        picked = _picked(rows)
        want = torch.full((len(picked), state.table.shape[1]), POISON_BYTE, dtype=torch.uint8)
        write_rows_ref(state.x[picked].cpu(), want, form, **_on_cpu(_options(state, is_fused), picked))
        assert_bits(name, state.table[state.slots[picked]].cpu(), want)
        return "exact"

    turned = 8 * _TURNED if is_fused else 0
    return Case(
        kernel=name,
        shape=f"{rows} x {channels}",
        make=lambda seed: _write_state(seed, rows, channels, form),
        run=run,
        outputs=lambda state: (state.table,),
        check=check,
        size_bytes=rows * (2 * channels + row_bytes(form, channels) + 8 + turned),
        baseline=baseline,
        goal_us=goal,
    )


def _entries_case(rows: int, fused: bool) -> Case:
    channels, keys = 512, 128

    def make(seed: int) -> SimpleNamespace:
        state = _write_state(seed, rows, channels, "nvfp4")
        state.index = torch.empty(rows, row_bytes("mxfp4", keys), dtype=torch.uint8, device="cuda")
        state.weights = {
            "norm": state.norm,
            "key": _normal(state.generator, keys, channels) * channels**-0.5,
            "key_norm": 1 + 0.1 * _normal(state.generator, keys),
            "eps": _EPS,
        }
        return state

    def run(state: SimpleNamespace) -> None:
        write_entries(state.x, state.table, state.index, state.slots, state.rotation, **state.weights, fused=fused)

    def baseline(state: SimpleNamespace) -> None:
        write_entries_ref(state.x, state.table, state.index, state.slots, state.rotation, **state.weights)

    def check(state: SimpleNamespace) -> str:
        picked = _picked(rows)
        tables = [torch.full((len(picked), width), POISON_BYTE, dtype=torch.uint8) for width in (288, 68)]
        want = (state.x[picked].cpu(), *tables, torch.arange(len(picked)), state.rotation[picked].cpu())
        write_entries_ref(*want, **_on_cpu(state.weights, picked))
        assert_bits("main", state.table[state.slots[picked]].cpu(), tables[0])
        keys_got = decode_mxfp4(state.index[state.slots[picked]].cpu(), keys)
        differ = (keys_got != decode_mxfp4(tables[1], keys)).float().mean().item()
        assert differ < 0.02, f"{differ:.4f} of the index values differ"
        return f"main exact, {100 * differ:.2f}% of index values another bin"

    return Case(
        kernel=f"ced/write_entries{'_fused' * fused}",
        shape=f"{rows} x {channels} -> 288 + 68",
        make=make,
        run=run,
        outputs=lambda state: (state.table, state.index),
        check=check,
        size_bytes=rows * (2 * channels + 288 + 68 + 8 + 8 * _TURNED) + 2 * keys * channels,
        flops=2.0 * rows * channels * keys,
        baseline=baseline,
    )


def _read_case(form: str, channels: int, slots: int, rows: int | None) -> Case:
    num_rows = rows or slots

    def make(seed: int) -> SimpleNamespace:
        generator = torch.Generator("cuda").manual_seed(seed)
        table = torch.empty(slots, row_bytes(form, channels), dtype=torch.uint8, device="cuda")
        for start in range(0, slots, 65536):
            block = table[start : start + 65536]
            write_rows(_normal(generator, len(block), channels), block, form)
        picked = None if rows is None else torch.randint(0, slots, (rows,), device="cuda", generator=generator)
        return SimpleNamespace(
            table=table, slots=picked, out=torch.empty(num_rows, channels, dtype=torch.bfloat16, device="cuda")
        )

    def run(state: SimpleNamespace) -> None:
        read_rows(state.table, form, channels, slots=state.slots, dtype=torch.bfloat16, out=state.out)

    def check(state: SimpleNamespace) -> str:
        picked = _picked(num_rows)
        slots_of = picked if state.slots is None else state.slots[picked]
        want = read_rows_ref(state.table.cpu(), form, channels, slots=slots_of.cpu()).bfloat16()
        assert_bits("values", state.out[picked].cpu(), want)
        return "exact"

    return Case(
        kernel=f"quant/read_{form}",
        shape=f"{num_rows} of {slots} x {channels}",
        make=make,
        run=run,
        outputs=lambda state: (state.out,),
        check=check,
        size_bytes=num_rows * (row_bytes(form, channels) + 2 * channels + (8 if rows else 0)),
        sets=2 if slots > 500_000 else None,
    )


def cases() -> Iterator[Case]:
    """Lines of the table."""
    for rows, goal in ((128, None), (8192, None), (65536, 30.0)):
        yield _write_case("quant/write_nvfp4", "nvfp4", rows, 512, False, goal)
        yield _write_case("quant/norm+rope+nvfp4", "nvfp4", rows, 512, True, goal)
    for rows in (128, 8192):
        yield _write_case("quant/norm+rope+fp8", "fp8", rows, 512, True, None)
        yield _write_case("quant/norm+rope+mxfp4", "mxfp4", rows, 128, True, None)
    for rows in (128, 8192, 65536):
        for fused in (False, True):
            yield _entries_case(rows, fused)
    yield _read_case("nvfp4", 512, 1 << 20, None)
    yield _read_case("nvfp4", 512, 1 << 20, 65536)
    yield _read_case("fp8", 512, 65536, None)
