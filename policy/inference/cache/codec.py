"""Stored rows of values that are rounded already, and reading them back through byte tables, bit for bit.

The model rounds before it stores (its straight-through quantisers), so that storing must be exact: encoding a rounded
value again may pick another scale, but has to decode to the same bits. Shapes: N rows, C channels, G scale groups.
"""

from functools import cache

import torch

from burnish.kernels.quant.reference import FP8_GROUP, MXFP4_GROUP, NVFP4_GROUP, decode_nvfp4, e8m0_value, encode_nvfp4

_E4M3_ONE = 0x38


@cache
def _pair_table(device: torch.device) -> torch.Tensor:
    """[256, 2] fp32: the two E2M1 values of a byte, low nibble first."""
    payload = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(-1, NVFP4_GROUP // 2)
    one = torch.full((256, 1), _E4M3_ONE, dtype=torch.uint8)
    return decode_nvfp4(torch.cat((payload, one), 1), NVFP4_GROUP)[:, :2].contiguous().to(device)


@cache
def _e8m0_table(device: torch.device) -> torch.Tensor:
    return e8m0_value(torch.arange(256, dtype=torch.uint8)).to(device)


@cache
def _e4m3_table(device: torch.device) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def _look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[...] uint8 -> [..., *table.shape[1:]]."""
    picked = table.index_select(0, codes.to(torch.int32).flatten())
    return picked.view(*codes.shape, *table.shape[1:])


def write_nvfp4(values: torch.Tensor) -> torch.Tensor:
    """NVFP4-rounded values [N, C] -> rows [N, C/2 + C/16] uint8 that decode to them.

    One kind of group needs help: the subnormal scale 2 * 2^-9 with largest code 4. Its largest value, 2^-6, alone would
    be given the scale 1 * 2^-9, where 6 is the end. Halved values have the right codes and the scale byte before.
    """
    channels = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -channels % NVFP4_GROUP)).unflatten(-1, (-1, NVFP4_GROUP))
    is_odd = padded.abs().amax(-1) == 2.0**-6
    factor = torch.where(is_odd, 0.5, 1.0).repeat_interleave(NVFP4_GROUP, -1)[:, :channels]
    rows = encode_nvfp4(values * factor)
    rows[:, channels // 2 :] += is_odd
    return rows


def read_nvfp4(rows: torch.Tensor, channels: int) -> torch.Tensor:
    """Main rows [N, C/2 + C/16] uint8 -> [N, C] fp32."""
    values = _look_up(_pair_table(rows.device), rows[:, : channels // 2]).view(len(rows), -1, NVFP4_GROUP)
    scales = _look_up(_e4m3_table(rows.device), rows[:, channels // 2 :])
    return (values * scales.unsqueeze(-1)).flatten(1)


def read_mxfp4(rows: torch.Tensor, channels: int) -> torch.Tensor:
    """Index rows [N, C/2 + C/32] uint8 -> [N, C] fp32."""
    values = _look_up(_pair_table(rows.device), rows[:, : channels // 2]).view(len(rows), -1, MXFP4_GROUP)
    scales = _look_up(_e8m0_table(rows.device), rows[:, channels // 2 :])
    return (values * scales.unsqueeze(-1)).flatten(1)


def read_fp8(rows: torch.Tensor, channels: int) -> torch.Tensor:
    """Window rows [N, C + C/32] uint8 -> [N, C] fp32."""
    values = _look_up(_e4m3_table(rows.device), rows[:, :channels]).view(len(rows), -1, FP8_GROUP)
    scales = _look_up(_e8m0_table(rows.device), rows[:, channels:])
    return (values * scales.unsqueeze(-1)).flatten(1)
