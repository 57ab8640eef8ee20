"""Rounding and codes of the quantised formats as Triton device functions, by integer operations on fp32 bits.

Nothing here depends on how a compiler contracts or divides: a product that must be rounded alone is launched with
enable_fp_fusion=False, divisions are div_rn. Values are fp32 throughout; a "pair" is an even and an odd channel in two
tensors of one shape. Twin: reference.py of this folder.
"""

import triton
import triton.language as tl

FP8 = tl.constexpr(0)
"""E4M3, an E8M0 scale for 32 channels."""
MXFP4 = tl.constexpr(1)
"""E2M1, an E8M0 scale for 32 channels."""
NVFP4 = tl.constexpr(2)
"""E2M1, an E4M3 scale for 16 channels."""

_TWO_120 = tl.constexpr(2.0**120)
_TWO_126 = tl.constexpr(2.0**126)
_TWO_M14 = tl.constexpr(2.0**-14)
_SIX = tl.constexpr(6.0 * 2.0**-14)


@triton.jit
def float_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def pack_bf16(even, odd, NATIVE: tl.constexpr):
    """Nearest bf16 values, ties to even, as one 32-bit word; the even one is the low half."""
    if NATIVE:
        # the conversion of one value runs at a quarter of this one's rate
        word = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low, high = float_bits(even), float_bits(odd)
        low = (low + 0x7FFF + ((low >> 16) & 1)) >> 16
        word = (low & 0xFFFF) | ((high + 0x7FFF + ((high >> 16) & 1)) & -65536)
    return word


@triton.jit
def unpack_bf16(word):
    """Even and odd value, fp32, of words of two bf16."""
    return bits_float(word << 16), bits_float(word & -65536)


@triton.jit
def pack_f16_to_six(even, odd, NATIVE: tl.constexpr):
    """Nearest fp16 values, ties to even, of positive values, at most 6 * 2^-14, as one word; the even one is low."""
    if NATIVE:
        word = tl.inline_asm_elementwise(
            "{.reg .b32 t, m; mov.b32 m, 0x0E000E00; cvt.rn.f16x2.f32 t, $2, $1; min.u16x2 $0, t, m;}",
            "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        even, odd = tl.minimum(even, _SIX).to(tl.float16), tl.minimum(odd, _SIX).to(tl.float16)
        low, high = even.to(tl.int16, bitcast=True).to(tl.int32), odd.to(tl.int16, bitcast=True).to(tl.int32)
        word = low | (high << 16)
    return word


@triton.jit
def p2ceil(x):
    """Smallest power of two >= x, for positive normal x."""
    return bits_float((float_bits(x) + 0x7FFFFF) & 0x7F800000)


@triton.jit
def inverse_p2(x):
    """1 / x of a power of two in 2^-126 .. 2^126."""
    return bits_float(0x7F000000 - float_bits(x))


@triton.jit
def e4m3_code(x, NATIVE: tl.constexpr):
    """Nearest E4M3 code of |x| <= 448 with its sign, ties to even; int32 in 0..255."""
    if NATIVE:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        m = tl.abs(x)
        bits = float_bits(m)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        # steps of 2^-9: the sum's last bit is one step, and its rounding is to even
        small = float_bits(m * 512.0 + 8388608.0) - 0x4B000000
        code = tl.where(m < 0.015625, small, normal) | ((float_bits(x) >> 24) & 0x80)
    return code


@triton.jit
def e4m3_value(code):
    """Value of an E4M3 code (int32 in 0..255, no NaN code)."""
    return bits_float(((code & 0x7F) << 20) | ((code & 0x80) << 24)) * _TWO_120


@triton.jit
def e8m0_value(code):
    """2^(code - 127); code 0 is the subnormal 2^-127."""
    return bits_float(tl.where(code == 0, 0x400000, code << 23))


@triton.jit
def e2m1_value(code):
    """Value of an E2M1 code (int32 in 0..15)."""
    # exponent and mantissa land where fp32 keeps its own: the subnormal code included, times 2^-126
    return bits_float(((code & 7) << 22) | ((code & 8) << 28)) * _TWO_126


@triton.jit
def e2m1_code(m, scale):
    """Nearest E2M1 code of m / scale, m >= 0: ties to the even code, saturating; int32 in 0..7.

    Exact for any fp32 m: a threshold times a scale of 4 significant bits is exact, and no quotient is rounded.
    """
    code = (m > 0.25 * scale).to(tl.int32)
    code += (m >= 0.75 * scale).to(tl.int32)
    code += (m > 1.25 * scale).to(tl.int32)
    code += (m >= 1.75 * scale).to(tl.int32)
    code += (m > 2.5 * scale).to(tl.int32)
    code += (m >= 3.5 * scale).to(tl.int32)
    return code + (m > 5.0 * scale).to(tl.int32)


@triton.jit
def e2m1_codes_of_bf16(even, odd, inverse, NATIVE: tl.constexpr):
    """`e2m1_code` of pairs of bf16 values from a reciprocal of their scale: codes in bits 0-2 and 16-18 of one word.

    fp16 times 2^-14 has E2M1's exponents and first mantissa bit where it has its own, the subnormal code included. A
    bf16 value that is no tie is 2^-8 away from one, reciprocal and product err by 2^-22: rounding to fp16's 11 bits
    makes every tie exact again and none out of what is no tie.
    """
    step = inverse * _TWO_M14
    word = pack_f16_to_six(tl.abs(even) * step, tl.abs(odd) * step, NATIVE)
    return ((word + 0x00FF00FF + ((word >> 9) & 0x00010001)) >> 9) & 0x00070007


@triton.jit
def load_pairs(ptr, offset, mask, BF16: tl.constexpr):
    """Channel pairs at pair number `offset`: `ptr` points to 32-bit words of two bf16, or to fp32."""
    if BF16:
        even, odd = unpack_bf16(tl.load(ptr + offset, mask=mask, other=0))
    else:
        even = tl.load(ptr + 2 * offset, mask=mask, other=0.0)
        odd = tl.load(ptr + 2 * offset + 1, mask=mask, other=0.0)
    return even, odd


@triton.jit
def store_pairs(ptr, offset, mask, even, odd, BF16: tl.constexpr, NATIVE: tl.constexpr):
    """Pairs at pair number `offset`, as 32-bit words of two bf16 or as fp32."""
    if BF16:
        tl.store(ptr + offset, pack_bf16(even, odd, NATIVE), mask=mask)
    else:
        tl.store(ptr + 2 * offset, even, mask=mask)
        tl.store(ptr + 2 * offset + 1, odd, mask=mask)


@triton.jit
def spread(groups, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """[ROWS, G] -> [ROWS, WORDS], each value repeated over its group."""
    count: tl.constexpr = groups.shape[1]
    wide = tl.broadcast_to(groups[:, :, None], (ROWS, count, WORDS // count))
    return tl.reshape(wide, (ROWS, WORDS))


@triton.jit
def group_scale(amax, FORM: tl.constexpr, BF16: tl.constexpr, NATIVE: tl.constexpr):
    """Stored scale byte (int32) of groups with largest magnitude `amax`, the scale and a reciprocal of it.

    The reciprocal is exact for powers of two and within 2^-22 for E4M3 scales.
    """
    if FORM == NVFP4:
        amax = tl.maximum(amax, 6.0 * 2.0**-9)
        if BF16:
            # the quotient of a bf16 value by 6 is a tie of E4M3 or 2^-8 away from one: 16 bits of it decide
            ratio = bits_float((float_bits(amax * (1.0 / 6.0)) + 0x80) & -256)
        else:
            ratio = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
        code = e4m3_code(tl.minimum(ratio, 448.0), NATIVE)
        scale = e4m3_value(code)
        inverse = 1.0 / scale
    else:
        if FORM == FP8:
            scale = p2ceil(tl.maximum(amax, 1e-4) * (1.0 / 448.0))
        else:
            scale = p2ceil(tl.maximum(amax, 6.0 * 2.0**-126) * (1.0 / 6.0))
        code = float_bits(scale) >> 23
        inverse = inverse_p2(scale)
    return code, scale, inverse


@triton.jit
def group_max(even, odd, ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """Largest of every GROUP channels: pairs [ROWS, WORDS] -> [ROWS, 2 * WORDS / GROUP]."""
    half: tl.constexpr = GROUP // 2
    return tl.max(tl.reshape(tl.maximum(even, odd), (ROWS, WORDS // half, half)), axis=2)


@triton.jit
def encode_fp8(
    even, odd, ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr, NATIVE: tl.constexpr
):
    """Even and odd codes [ROWS, WORDS] (int32) and scale bytes [ROWS, 2 * WORDS / GROUP] (int32) of FP8 rows.

    STORED: the bytes of a value that was rounded before, as the cache's store writes them: where the largest code of a
    group is half of the format's range, the scale is halved and the codes are doubled, which decodes to the same.
    """
    amax = group_max(tl.abs(even), tl.abs(odd), ROWS, WORDS, GROUP)
    scale_code, _, inverse = group_scale(amax, FP8, False, NATIVE)
    wide = spread(inverse, ROWS, WORDS)
    even_code, odd_code = e4m3_code(even * wide, NATIVE), e4m3_code(odd * wide, NATIVE)
    if STORED:
        even_m, odd_m = even_code & 0x7F, odd_code & 0x7F
        # 0x76 is 224; 2^-22 is the least scale
        halve = ((group_max(even_m, odd_m, ROWS, WORDS, GROUP) == 0x76) & (scale_code > 127 - 22)).to(tl.int32)
        scale_code -= halve
        twice = spread(halve, ROWS, WORDS)
        even_code += twice * tl.minimum(even_m, 8)
        odd_code += twice * tl.minimum(odd_m, 8)
    return even_code, odd_code, scale_code


@triton.jit
def encode_fp4(
    even, odd, ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    BF16: tl.constexpr, STORED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Packed bytes [ROWS, WORDS] (int32) and scale bytes [ROWS, 2 * WORDS / GROUP] (int32) of MXFP4 or NVFP4 rows.

    BF16: the values are on the bf16 grid, which allows a form with half of the operations.
    """
    amax = group_max(tl.abs(even), tl.abs(odd), ROWS, WORDS, GROUP)
    scale_code, scale, inverse = group_scale(amax, FORM, BF16, NATIVE)
    if BF16:
        codes = e2m1_codes_of_bf16(even, odd, spread(inverse, ROWS, WORDS), NATIVE)
    else:
        wide = spread(scale, ROWS, WORDS)
        codes = e2m1_code(tl.abs(even), wide) | (e2m1_code(tl.abs(odd), wide) << 16)
    if STORED and FORM == MXFP4:
        # as in encode_fp8; code 5 is 3, half of 6. Levels 0 .5 1 1.5 2 3: codes 0 1 2 double as numbers, then + 2
        low, high = codes & 7, codes >> 16
        halve = ((group_max(low, high, ROWS, WORDS, GROUP) == 5) & (scale_code > 1)).to(tl.int32)
        scale_code -= halve
        codes += spread(halve, ROWS, WORDS) * (tl.minimum(low, 2) | (tl.minimum(high, 2) << 16))
    codes |= ((float_bits(even) >> 28) & 8) | ((float_bits(odd) >> 12) & 0x80000)
    return (codes | (codes >> 12)) & 0xFF, scale_code
