"""Single-pass hyper-connections between two sub-layers, RMSNorm and rotation, forward and backward."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from cases import Case

from burnish.kernels.mhc.boundary import Tiles, choose_tiles, launch_forward, split_projection
from burnish.kernels.mhc.boundary_backward import coefficient_gradients, launch_backward
from burnish.kernels.mhc.reference import boundary_ref
from burnish.kernels.mhc.single_pass import backward_tiles
from burnish.kernels.norm.reference import rms_norm_ref
from burnish.kernels.norm.rms_norm import rms_norm
from burnish.kernels.rope.reference import rotate_ref
from burnish.kernels.rope.rotate import rotate_
from burnish.kernels.testing import assert_close, error_ratio

SIZE = 5120
_OPTIONS = {"norm_eps": 1e-20, "eps": 1e-6, "iters": 20}
_CHECKED = 512
"""Rows that float64 checks, drawn from all."""
_PROCESSORS = 132


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=generator)


def _state(seed: int, rows: int, tiles: Tiles | None) -> SimpleNamespace:
    generator = torch.Generator("cuda").manual_seed(seed)
    state = SimpleNamespace(
        y=_normal(generator, rows, SIZE).bfloat16(),
        streams=_normal(generator, rows, 4, SIZE).bfloat16(),
        pre=torch.rand(rows, 4, device="cuda", generator=generator),
        post=2 * torch.rand(rows, 4, device="cuda", generator=generator),
        comb=torch.rand(rows, 4, 4, device="cuda", generator=generator) / 2,
        fn=_normal(generator, 24, 4 * SIZE) * 0.02,
        base=_normal(generator, 24),
        scale=torch.tensor([1.0, 0.7, 1.3], device="cuda"),
        tiles=tiles or choose_tiles(rows, SIZE, _PROCESSORS, False),
    )
    state.projection = split_projection(state.fn, torch.bfloat16)
    return state


def _inputs(state: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    return state.y, state.streams, state.pre, state.post, state.comb


def _exact(values: tuple[torch.Tensor, ...], fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor):
    """The boundary in float64, streams rounded to bf16 where the model rounds them (gradient straight through)."""
    y, streams, pre, post, comb = (value.double() for value in values)
    new = post.unsqueeze(2) * y.unsqueeze(1) + torch.einsum("rjk,rjd->rkd", comb, streams)
    new = new + (new.detach().bfloat16().double() - new.detach())
    collapsed = torch.einsum("rs,rsd->rd", pre, new)
    x = new.flatten(1)
    u = (x @ fn.double().T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + _OPTIONS["norm_eps"])
    sigma = scale.double()[torch.tensor([0] * 4 + [1] * 4 + [2] * 16, device=fn.device)]
    logits = base.double() + u * sigma
    mix = logits[:, 8:].unflatten(1, (4, 4)).softmax(-1) + _OPTIONS["eps"]
    mix = mix / (mix.sum(1, keepdim=True) + _OPTIONS["eps"])
    for _ in range(_OPTIONS["iters"] - 1):
        mix = mix / (mix.sum(2, keepdim=True) + _OPTIONS["eps"])
        mix = mix / (mix.sum(1, keepdim=True) + _OPTIONS["eps"])
    return new, collapsed, logits[:, :4].sigmoid() + _OPTIONS["eps"], 2 * logits[:, 4:8].sigmoid(), mix


def forward_case(rows: int, goal: float | None, tiles: Tiles | None = None) -> Case:
    """A boundary with its coefficients; the projection's halves are made once for fixed weights."""

    def run(state: SimpleNamespace) -> None:
        state.result = launch_forward(
            *_inputs(state), state.projection, state.base, state.scale, **_OPTIONS, tiles=state.tiles
        )

    def check(state: SimpleNamespace) -> str:
        picked = torch.randperm(rows, device="cuda")[:_CHECKED]
        want = _exact(tuple(value[picked] for value in _inputs(state)), state.fn, state.base, state.scale)
        got = [value[picked] for value in (state.result.streams, state.result.collapsed, *state.result.coefficients)]
        # the second output is rounded to bf16 once more than float64 is
        for name, a, b, bound in zip(
            ("streams", "collapsed", "pre", "post", "comb"), got, want, (2e-4, 3e-3, 3e-5, 3e-5, 3e-5), strict=True
        ):
            assert_close(name, a, b, bound)
        inputs = (value[picked] for value in _inputs(state))
        twin = boundary_ref(*inputs, state.fn, state.base, state.scale, **_OPTIONS, tiled=False)
        return f"comb {error_ratio(got[4], want[4]):.1e} (twin {error_ratio(twin[4], want[4]):.1e})"

    def baseline(state: SimpleNamespace) -> None:
        boundary_ref(*_inputs(state), state.fn, state.base, state.scale, **_OPTIONS, tiled=False)

    return Case(
        kernel="mhc boundary", shape=f"{rows} x 4 x {SIZE}", make=lambda seed: _state(seed, rows, tiles), run=run,
        outputs=lambda state: (), check=check, size_bytes=rows * SIZE * 2 * 10, flops=rows * 4 * SIZE * 24 * 2,
        baseline=baseline, goal_us=goal,
    )  # fmt: skip


def backward_case(rows: int, tiles: Tiles | None = None) -> Case:
    """All gradients of a boundary."""

    def make(seed: int) -> SimpleNamespace:
        state = _state(seed, rows, None)
        generator = torch.Generator("cuda").manual_seed(seed + 1)
        state.result = launch_forward(
            *_inputs(state), state.projection, state.base, state.scale, **_OPTIONS, tiles=state.tiles
        )
        state.grads = [
            _normal(generator, *out.shape).to(out) for out in (*state.result[:2], *state.result.coefficients)
        ]
        state.back = tiles or backward_tiles(rows, SIZE, _PROCESSORS, False)
        return state

    def run(state: SimpleNamespace) -> None:
        coefficients = coefficient_gradients(
            state.result.raw, state.base, state.scale, state.result.coefficients, tuple(state.grads[2:]),
            torch.bfloat16, size=SIZE, **_OPTIONS,
        )  # fmt: skip
        state.got = launch_backward(
            *_inputs(state), state.projection, state.result.streams, coefficients, *state.grads[:2], state.back
        )

    def check(state: SimpleNamespace) -> str:
        # float64 of all rows at once does not fit everywhere: parameters are checked on a launch of fewer rows
        few = SimpleNamespace(**{name: value[:_CHECKED] for name, value in vars(state).items() if name in _PER_ROW})
        few.fn, few.base, few.scale = state.fn, state.base, state.scale
        few.projection, few.back = state.projection, state.back
        few.result = launch_forward(*_inputs(few), few.projection, few.base, few.scale, **_OPTIONS, tiles=state.tiles)
        few.grads = [grad[:_CHECKED].contiguous() for grad in state.grads]
        run(few)
        leaves = [value.double().requires_grad_() for value in (*_inputs(few), few.fn, few.base, few.scale)]
        outputs = _exact(tuple(leaves[:5]), *leaves[5:])
        want = torch.autograd.grad(outputs, leaves, [grad.double() for grad in few.grads])
        for name, a, b in zip(few.got._fields, few.got, want, strict=True):
            assert_close(f"d{name}", a, b, 5e-3)
        for name in ("y", "streams", "pre", "post", "comb"):
            assert_close(f"d{name} in all rows", getattr(state.got, name)[: len(few.y)], getattr(few.got, name), 1e-3)
        return f"dfn {error_ratio(few.got.fn, want[5]):.1e}"

    return Case(
        kernel="mhc boundary backward", shape=f"{rows} x 4 x {SIZE}", make=make, run=run, outputs=lambda state: (),
        check=check, size_bytes=rows * SIZE * 2 * 19, flops=2 * rows * 4 * SIZE * 24 * 2,
    )  # fmt: skip


_PER_ROW = ("y", "streams", "pre", "post", "comb")


def _norm_case(rows: int, size: int, is_backward: bool) -> Case:
    def make(seed: int) -> SimpleNamespace:
        generator = torch.Generator("cuda").manual_seed(seed)
        x = _normal(generator, rows, size).bfloat16()
        weight = (1 + 0.1 * _normal(generator, size)).bfloat16()
        return SimpleNamespace(
            x=x.requires_grad_(is_backward), weight=weight.requires_grad_(is_backward),
            dy=_normal(generator, rows, size).bfloat16(),
        )  # fmt: skip

    def forward(state: SimpleNamespace) -> None:
        state.y = rms_norm(state.x, state.weight, 1e-20)

    def backward(state: SimpleNamespace) -> None:
        if not hasattr(state, "y"):
            forward(state)
        state.dx, state.dw = torch.autograd.grad(state.y, (state.x, state.weight), state.dy, retain_graph=True)

    def check(state: SimpleNamespace) -> str:
        x, weight = state.x.detach().double().requires_grad_(), state.weight.detach().double().requires_grad_()
        want = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20)
        assert_close("y", state.y, want, 3e-3)
        if is_backward:
            dx, dw = torch.autograd.grad(want, (x, weight), state.dy.double())
            assert_close("dx", state.dx, dx, 3e-3)
            assert_close("dw", state.dw, dw, 3e-3)
        return f"error {error_ratio(state.y, want):.1e}"

    return Case(
        kernel="rms norm backward" if is_backward else "rms norm", shape=f"{rows} x {size}", make=make,
        run=backward if is_backward else forward, outputs=lambda state: (), check=check,
        size_bytes=rows * size * 2 * (3 if is_backward else 2),
        baseline=None if is_backward else lambda state: rms_norm_ref(state.x, state.weight, 1e-20),
    )  # fmt: skip


def _rotate_case(rows: int) -> Case:
    def make(seed: int) -> SimpleNamespace:
        generator = torch.Generator("cuda").manual_seed(seed)
        angle = torch.rand(rows, 32, device="cuda", generator=generator) * 6.3
        x = _normal(generator, rows, 64, 512).bfloat16()
        return SimpleNamespace(x=x, before=x[:_CHECKED].clone(), rotation=torch.polar(torch.ones_like(angle), angle))

    def run(state: SimpleNamespace) -> None:
        rotate_(state.x, state.rotation)

    def check(state: SimpleNamespace) -> str:
        rows = slice(0, _CHECKED)
        want = rotate_ref(state.before, state.rotation[rows])
        same = (state.x[rows] == want).float().mean().item()
        assert_close("rotated", state.x[rows], want, 3e-3)
        return f"{100 * same:.3f}% equal"

    return Case(
        kernel="rotation in place", shape=f"{rows} x 64 x 512 (64)", make=make, run=run, outputs=lambda state: (),
        check=check, size_bytes=rows * (64 * 64 * 2 * 2 + 256),
        baseline=lambda state: rotate_ref(state.x, state.rotation),
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """Lines of the table."""
    yield forward_case(128, 5.5)
    yield forward_case(1024, None)
    yield forward_case(8192, 217.0)
    yield forward_case(32768, None)
    yield backward_case(8192)
    yield _norm_case(128, SIZE, False)
    yield _norm_case(8192, SIZE, False)
    yield _norm_case(8192, SIZE, True)
    yield _rotate_case(8192)
