"""Pure-torch twins of the quantisers: the fake forms the model computes with and the codes the caches store.

Formats (model paper, cache numerics): FP8 = E4M3 with an E8M0 scale for 32 channels (window keys); MXFP4 = E2M1 with
an E8M0 scale for 32 channels (index keys and queries); NVFP4 = E2M1 with an E4M3 scale for 16 channels and no tensor
scale (main entries). A ragged last group is filled up with zeros. Everything is fp32 inside; decode(encode(x)) equals
the fake form bit for bit, signed zeros included.
"""

import torch

from burnish.kernels.rope.reference import rotate_ref

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_GROUP, MXFP4_GROUP, NVFP4_GROUP = 32, 32, 16


def p2ceil(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= x, for positive normal fp32 x, from the bits (never through log2)."""
    # any mantissa bit carries into the exponent
    bits = x.float().contiguous().view(torch.int32) + 0x7FFFFF
    return (bits & 0x7F800000).view(torch.float32)


def e2m1_level(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 magnitude to |x| itself, ties to the even code, saturating at 6; fp32."""
    m = x.abs()
    level = m.clamp_max(2.0).mul_(2.0).round_().mul_(0.5)
    level += m.clamp(2.0, 4.0).round_()
    level += m.clamp_(4.0, 6.0).mul_(0.5).round_().mul_(2.0)
    return level.sub_(6.0)


def e2m1_code(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 magnitude index of |x| (ties to the even code, saturating at 6), uint8 in 0..7."""
    # steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6: three saturating roundings to even, four counted twice
    m = x.abs()
    code = m.clamp_max(2.0).mul_(2.0).round_()
    code += m.clamp(2.0, 4.0).round_()
    code += m.clamp_(4.0, 6.0).mul_(0.5).round_()
    return code.sub_(4.0).to(torch.uint8)


def _groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """[..., C] -> [..., ceil(C/group), group] fp32, zero-filled."""
    pad = -x.shape[-1] % group
    x = x.float()
    if pad:
        x = torch.nn.functional.pad(x, (0, pad))
    return x.unflatten(-1, (-1, group))


def _scale(groups: torch.Tensor, kind: str) -> torch.Tensor:
    """Group scales [..., G, 1] fp32. `* (1/448)` and `* (1/6)` are multiplications on purpose, `/ 6` a division."""
    amax = groups.abs().amax(-1, keepdim=True)
    if kind == "fp8":
        return p2ceil(amax.clamp_min(1e-4) * (1.0 / 448.0))
    if kind == "mxfp4":
        return p2ceil(amax.clamp_min(6.0 * 2.0**-126) * (1.0 / 6.0))
    # by a tensor: on CUDA torch divides by a Python number with its rounded reciprocal
    ratio = amax.clamp_min(6.0 * 2.0**-9) / amax.new_full((), 6.0)
    return ratio.clamp_max(448.0).to(torch.float8_e4m3fn).float()


def _levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(E2M1, device=device, dtype=torch.float32)


class _StraightThrough(torch.autograd.Function):
    """Rounds forward; the gradient passes as if nothing had happened."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kind: str) -> torch.Tensor:
        group = {"fp8": FP8_GROUP, "mxfp4": MXFP4_GROUP, "nvfp4": NVFP4_GROUP}[kind]
        groups = _groups(x, group)
        scale = _scale(groups, kind)
        if kind == "fp8":
            rounded = (groups / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
        else:
            scaled = groups / scale
            rounded = torch.copysign(e2m1_level(scaled), scaled)
        return (rounded * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def fake_fp8(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., C] rounded to FP8 (window keys), same shape and dtype; straight-through gradient."""
    return _StraightThrough.apply(x, "fp8")


def fake_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., C] rounded to MXFP4 (index queries and keys), same shape and dtype; straight-through gradient."""
    return _StraightThrough.apply(x, "mxfp4")


def fake_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., C] rounded to NVFP4 (main entries), same shape and dtype; straight-through gradient."""
    return _StraightThrough.apply(x, "nvfp4")


def _pack_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [..., C/2] bytes, the low nibble is the even channel."""
    code = e2m1_code(scaled) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """[..., C/2] bytes -> [..., C] fp32."""
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    level = _levels(packed.device)[(code & 7).long()]
    return torch.where(code >= 8, -level, level)


def _e8m0_byte(scale: torch.Tensor) -> torch.Tensor:
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def e8m0_value(byte: torch.Tensor) -> torch.Tensor:
    """Powers of two 2^(byte-127) in fp32; byte 0 is the subnormal 2^-127."""
    value = (byte.to(torch.int32) << 23).view(torch.float32)
    return torch.where(byte == 0, torch.full_like(value, 2.0**-127), value)


def encode_fp8(x: torch.Tensor) -> torch.Tensor:
    """Window keys [..., C] -> rows [..., C + C/32] uint8: E4M3 payload, then E8M0 scales."""
    groups = _groups(x, FP8_GROUP)
    scale = _scale(groups, "fp8")
    payload = (groups / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    return torch.cat((payload, _e8m0_byte(scale).squeeze(-1)), -1)


def decode_fp8(rows: torch.Tensor, channels: int) -> torch.Tensor:
    """Inverse of `encode_fp8`: [..., channels] fp32."""
    payload, scale = rows[..., :channels], rows[..., channels:]
    value = payload.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, FP8_GROUP))
    return (value * e8m0_value(scale).unsqueeze(-1)).flatten(-2)


def encode_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """Index keys [..., C] -> rows [..., C/2 + C/32] uint8: packed E2M1, then E8M0 scales."""
    groups = _groups(x, MXFP4_GROUP)
    scale = _scale(groups, "mxfp4")
    return torch.cat((_pack_e2m1((groups / scale).flatten(-2)), _e8m0_byte(scale).squeeze(-1)), -1)


def decode_mxfp4(rows: torch.Tensor, channels: int) -> torch.Tensor:
    """Inverse of `encode_mxfp4`: [..., channels] fp32."""
    value = _unpack_e2m1(rows[..., : channels // 2]).unflatten(-1, (-1, MXFP4_GROUP))
    return (value * e8m0_value(rows[..., channels // 2 :]).unsqueeze(-1)).flatten(-2)


def encode_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Main entries [..., C] -> rows [..., C/2 + C/16] uint8: packed E2M1, then E4M3 scales."""
    groups = _groups(x, NVFP4_GROUP)
    scale = _scale(groups, "nvfp4")
    scale_byte = scale.to(torch.float8_e4m3fn).view(torch.uint8).squeeze(-1)
    return torch.cat((_pack_e2m1((groups / scale).flatten(-2)), scale_byte), -1)


def decode_nvfp4(rows: torch.Tensor, channels: int) -> torch.Tensor:
    """Inverse of `encode_nvfp4`: [..., channels] fp32."""
    value = _unpack_e2m1(rows[..., : channels // 2]).unflatten(-1, (-1, NVFP4_GROUP))
    scale = rows[..., channels // 2 :].contiguous().view(torch.float8_e4m3fn).float()
    return (value * scale.unsqueeze(-1)).flatten(-2)


GROUPS = {"fp8": FP8_GROUP, "mxfp4": MXFP4_GROUP, "nvfp4": NVFP4_GROUP}
"""Form -> channels of one scale."""
_FAKE = {"fp8": fake_fp8, "mxfp4": fake_mxfp4, "nvfp4": fake_nvfp4}
_ENCODE = {"fp8": encode_fp8, "mxfp4": encode_mxfp4, "nvfp4": encode_nvfp4}
_DECODE = {"fp8": decode_fp8, "mxfp4": decode_mxfp4, "nvfp4": decode_nvfp4}


def row_bytes(form: str, channels: int) -> int:
    """Bytes of one stored row: payload, then scales."""
    payload = channels if form == "fp8" else channels // 2
    return payload + channels // GROUPS[form]


def norm_rows_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of [N, C] whose fp32 mean does not depend on the order of the sum: it is summed in fp64."""
    x32 = x.float()
    mean = x32.double().square().mean(-1, keepdim=True).float()
    return (weight.float() * (x32 * (mean + eps).sqrt().reciprocal())).to(x.dtype)


def write_rows_ref(
    x: torch.Tensor,
    table: torch.Tensor,
    form: str,
    *,
    slots: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    rotation: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    stored: bool = False,
) -> None:
    """Norm, rotate and encode `x` [N, C] into rows of `table` [S, row bytes]; see kernels/quant/write.py.

    `stored` writes the bytes of the rounded value: a second encoding may choose half the scale, and decodes the same.
    """
    if norm is not None:
        x = norm_rows_ref(x, norm, eps)
    if normed is not None:
        normed.copy_(x)
    if rotation is not None:
        x = rotate_ref(x, rotation)
    # main rows are stored as they are rounded; see the cache's codec
    rows = _ENCODE[form](_FAKE[form](x) if stored and form != "nvfp4" else x)
    table[torch.arange(len(x), device=x.device) if slots is None else slots.long()] = rows


def read_rows_ref(table: torch.Tensor, form: str, channels: int, *, slots: torch.Tensor | None = None) -> torch.Tensor:
    """Rows in `slots` [N] of `table` -> [N, channels] fp32; slot -1 reads zeros."""
    if slots is None:
        return _DECODE[form](table, channels)
    values = _DECODE[form](table[slots.long().clamp_min(0)], channels)
    return values.masked_fill((slots < 0).unsqueeze(-1), 0.0)
