"""Parity helpers shared by tests/kernels and benchmarks/: one error measure, outputs poisoned before a kernel runs."""

import torch

POISON_BYTE = 0xA5
"""What integer outputs hold before a kernel writes them; float outputs hold NaN."""


def error_ratio(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS of the difference over RMS of the reference: one number that means the same for every shape and dtype."""
    got, want = got.double(), want.double()
    return ((got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp_min(1e-12)).item()


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, ratio: float) -> None:
    """Fail with the number, the bound and the worst coordinate when `error_ratio` exceeds `ratio`."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, reference {tuple(want.shape)}"
    unwritten = (~torch.isfinite(got)).sum().item()
    assert not unwritten, f"{name}: {unwritten} of {got.numel()} values are not finite"
    measured = error_ratio(got, want)
    worst = (got.double() - want.double()).abs().argmax()
    where = tuple(int(i) for i in torch.unravel_index(worst, got.shape))
    assert measured <= ratio, f"{name}: error ratio {measured:.2e} > {ratio:.0e}, worst at {where}"


def assert_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Fail with the number of differing elements and the first of them unless both hold the same bits."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, reference {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, reference {want.dtype}"
    if not got.numel():
        return
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    got, want = got.contiguous().cpu(), want.contiguous().cpu()
    different = (got.view(integer) != want.view(integer)).nonzero()
    if len(different):
        where = tuple(different[0].tolist())
        raise AssertionError(
            f"{name}: {len(different)} of {got.numel()} elements differ, first at {where}: "
            f"got {got[where].item()}, want {want[where].item()}"
        )


def poison(*tensors: torch.Tensor) -> None:
    """Fill outputs with what no kernel writes everywhere."""
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else POISON_BYTE)
