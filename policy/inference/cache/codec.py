"""Decoding stored rows on the read path: the quantisers' inverse through byte tables, bit for bit the twins' values.

Shapes: N rows, C channels, G scale groups.
"""

from functools import cache

import torch

from burnish.kernels.quant.reference import FP8_GROUP, MXFP4_GROUP, NVFP4_GROUP, decode_nvfp4, e8m0_value

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
