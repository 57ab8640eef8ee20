"""The quantisers' twins: published vectors, special values, stored codes."""

import pytest
import torch

from burnish.kernels.quant import reference as quant

VECTOR = torch.tensor([0.1, -0.25, 0.5, -0.75, 1, -1.25, 1.5, -1.75, 2, -2.5, 3, -3.5, 4, -5, 5.5, -7])
FORMS = {
    "fp8": (quant.fake_fp8, quant.encode_fp8, quant.decode_fp8),
    "mxfp4": (quant.fake_mxfp4, quant.encode_mxfp4, quant.decode_mxfp4),
    "nvfp4": (quant.fake_nvfp4, quant.encode_nvfp4, quant.decode_nvfp4),
}


def test_main_entries_round_to_the_published_vector():
    want = [0, -0.0, 0.5625, -0.5625, 1.125, -1.125, 1.6875, -1.6875, 2.25, -2.25, 3.375, -3.375, 4.5, -4.5, 4.5, -6.75]
    assert torch.equal(quant.fake_nvfp4(VECTOR), torch.tensor(want))


def test_index_keys_round_to_the_published_vector():
    want = [0, -0.0, 0, -1, 1, -1, 2, -2, 2, -2, 3, -4, 4, -4, 6, -8]
    assert torch.equal(quant.fake_mxfp4(VECTOR), torch.tensor(want))


def test_window_keys_round_to_the_published_vector():
    want = VECTOR.clone()
    want[0] = 0.1015625
    assert torch.equal(quant.fake_fp8(VECTOR), want)


def test_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = quant.e2m1_code(ties)
    assert [quant.E2M1[c] for c in codes.tolist()] == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("amax", "byte"),
    zip(
        [0.75, 5.9, 6.0, 6.01, 6.5, 6.9, 7.0, 7.9, 12.0, 12.5],
        [124, 127, 127, 128, 128, 128, 128, 128, 128, 129],
        strict=True,
    ),
)
def test_shared_exponent_rounds_up(amax, byte):
    row = quant.encode_mxfp4(torch.tensor([amax] + [0.0] * 31))
    assert row[-1].item() == byte


def test_rounding_up_never_clips():
    block = torch.tensor([7.9, -7, 5, 1, 0.2] + [0.0] * 27)
    assert quant.fake_mxfp4(block)[:5].tolist() == [8, -8, 4, 1, 0]


@pytest.mark.parametrize("form", FORMS)
def test_zero_groups_stay_zero(form):
    fake, encode, decode = FORMS[form]
    zero = torch.zeros(2, 64)
    assert torch.equal(fake(zero), zero)
    assert torch.equal(decode(encode(zero), 64), zero)


@pytest.mark.parametrize("form", FORMS)
def test_stored_codes_decode_to_the_fake_form_bit_for_bit(form):
    fake, encode, decode = FORMS[form]
    torch.manual_seed(42)
    x = torch.randn(257, 96) * torch.logspace(-6, 3, 257).unsqueeze(1)
    x[3, 5], x[4] = -0.0, 1e-30
    assert torch.equal(decode(encode(x), 96).view(torch.int32), fake(x).view(torch.int32))


@pytest.mark.parametrize(("form", "size"), [("fp8", 528), ("nvfp4", 288)])
def test_rows_have_the_stored_sizes(form, size):
    assert FORMS[form][1](torch.randn(1, 512)).shape == (1, size)


def test_index_rows_have_68_bytes():
    assert quant.encode_mxfp4(torch.randn(1, 128)).shape == (1, 68)


@pytest.mark.parametrize("form", FORMS)
def test_gradient_is_straight_through(form):
    x = torch.randn(3, 64, requires_grad=True)
    FORMS[form][0](x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
