"""Decode attention over stored bytes against its twin in fp64."""

import pytest
import torch

from burnish.kernels.attention.decode import Shape, decode_attention, decode_attention_ref, plan
from burnish.kernels.quant.reference import encode_fp8, encode_nvfp4
from burnish.kernels.testing import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# a GPU's exp2 and log2 err by 2^-22
RATIO = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


def inputs(rows: int, heads: int, channels: int, window: int, entries: int, dtype: torch.dtype) -> tuple:
    q = torch.randn(rows, heads, channels).to(dtype)
    ring = encode_fp8(torch.randn(96, channels))
    table = encode_nvfp4(torch.randn(300, channels))
    slots = torch.randint(0, 96, (rows, window), dtype=torch.int32)
    selected = torch.randint(0, 300, (rows, entries), dtype=torch.int32)
    slots[torch.rand(slots.shape) < 0.2] = -1
    selected[torch.rand(selected.shape) < 0.1] = -1
    return q, ring, slots, table, selected, torch.randn(heads), channels**-0.5


def attend(arguments: tuple, **options) -> torch.Tensor:
    moved = [value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in arguments]
    return decode_attention(*moved, **options).cpu()


def wanted(arguments: tuple) -> torch.Tensor:
    q, *rest = arguments
    return decode_attention_ref(q.double(), *rest)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", RATIO, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "channels"), [(4, 32), (8, 256), (64, 512)])
def test_matches_the_twin_in_fp64(heads, channels, splits, dtype):
    if DEVICE == "cuda" and dtype is torch.float32 and channels == 512:
        pytest.skip("exact fp32 products have no tensor cores: this width compiles for minutes, and no model uses it")
    arguments = inputs(3, heads, channels, 40, 70, dtype)
    arguments[2][1], arguments[4][1] = -1, -1  # a row without a key
    arguments[2][2] = -1
    shape = Shape(splits=splits, block=64 if channels == 512 else 16, warps=4, stages=2)
    got = attend(arguments, shape=shape)
    assert got.dtype is dtype
    assert_close("out", got, wanted(arguments), RATIO[dtype])
    assert torch.equal(got[1], torch.zeros_like(got[1]))


@pytest.mark.triton
@pytest.mark.parametrize("asm", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_more_splits_than_blocks_and_one_key(asm):
    arguments = inputs(2, 4, 32, 16, 16, torch.bfloat16)
    arguments[4][:, 1:] = -1
    shape = Shape(splits=5, block=16, warps=4, stages=1)
    assert_close("out", attend(arguments, shape=shape, asm=asm), wanted(arguments), RATIO[torch.bfloat16])


@pytest.mark.triton
@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 10])
@pytest.mark.parametrize(("window", "entries"), [(128, 512), (40, 70), (128, 16), (16, 512)])
@pytest.mark.parametrize("form", ["hopper", "staged"])
def test_the_hopper_forms_match_the_twin_in_fp64(window, entries, splits, form):
    arguments = inputs(5, 64, 512, window, entries, torch.bfloat16)
    arguments[2][1], arguments[4][1] = -1, -1
    arguments[2][2], arguments[4][3] = -1, -1
    got = attend(arguments, shape=Shape(splits=splits, form=form))
    assert_close("out", got, wanted(arguments), RATIO[torch.bfloat16])
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    again = attend(arguments, shape=Shape(splits=splits, form=form))
    assert torch.equal(got, again), "two runs differ: a race"


@pytest.mark.triton
def test_large_and_small_scales_are_kept():
    q, _, window, _, selected, sink, scale = inputs(2, 4, 64, 32, 32, torch.float32)
    ring = encode_fp8(torch.randn(96, 64) * torch.logspace(-3, 3, 96).unsqueeze(1))
    table = encode_nvfp4(torch.randn(300, 64) * torch.logspace(-3, 2, 300).unsqueeze(1))
    arguments = (q, ring, window, table, selected, sink, scale)
    shape = Shape(splits=1, block=32, warps=4, stages=1)
    assert_close("out", attend(arguments, shape=shape), wanted(arguments), 1e-5)


def test_the_plan_fills_the_gpu_without_empty_splits():
    assert [plan(rows, 640).splits for rows in (1, 13, 32, 64, 128, 4096)] == [10, 10, 4, 2, 1, 1]


def test_slots_of_the_wrong_dtype_are_refused():
    q, ring, window, table, selected, sink, scale = inputs(2, 4, 32, 16, 16, torch.float32)
    with pytest.raises(ValueError, match=r"selected must be contiguous int32 \[2, slots\], got torch.int64"):
        decode_attention(q, ring, window, table, selected.long(), sink, scale)


def test_off_the_gpu_the_twin_answers():
    arguments = inputs(2, 4, 32, 16, 16, torch.float32)
    assert torch.equal(decode_attention(*arguments), decode_attention_ref(*arguments))
