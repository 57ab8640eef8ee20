"""Key-value work of a Full layer in one kernel: latent norm, main row, index key, both rows scattered into the cache.

The compressor's output is read once; the latent, the rotated latent and the index key never reach memory. At the cut
of the encoder-decoder this runs for all rows of a prompt, the decoder above it for the last ones only.
Shapes: N entries, C latent channels, D index channels, P rotated pairs, S slots. Twin: reference.py of this folder.
Source: model paper, section 8.3.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from burnish.kernels.ced.reference import write_entries_ref
from burnish.kernels.dispatch import is_interpreted, use_reference
from burnish.kernels.quant.bits import MXFP4, NVFP4, load_pairs, pack_bf16, unpack_bf16
from burnish.kernels.quant.write import (
    check_table,
    inverse_rms,
    rotate_pairs,
    round_pairs,
    row_rstd,
    squares,
    store_rows,
    words,
    write_rows,
)


@triton.jit
def dot_operand(even, odd, ROWS: tl.constexpr, WORDS: tl.constexpr, BF16: tl.constexpr, NATIVE: tl.constexpr):
    """Pairs [ROWS, WORDS] -> channels [ROWS, 2 * WORDS]; bf16 where the tensor cores take it, else fp32."""
    if BF16 and NATIVE:
        word = pack_bf16(even, odd, NATIVE)
        even, odd = word.to(tl.int16), (word >> 16).to(tl.int16)
        channels = tl.reshape(tl.join(even, odd), (ROWS, 2 * WORDS)).to(tl.bfloat16, bitcast=True)
    else:
        channels = tl.reshape(tl.join(even, odd), (ROWS, 2 * WORDS))
    return channels


@triton.jit
def latent_chunk(
    chunk, key, x_ptr, norm_ptr, key_ptr, rotation_ptr, main_ptr, slot, row, live, rstd,
    PAIRS: tl.constexpr, CHUNK: tl.constexpr, KEY: tl.constexpr, TURNED: tl.constexpr, TURNS: tl.constexpr,
    BF16: tl.constexpr, STORED: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One chunk of the latent: its part of the main row, and of the index key's product, which is returned."""
    channel = 2 * chunk * CHUNK + tl.arange(0, 2 * CHUNK)[None, :]
    place = key_ptr + tl.arange(0, KEY)[:, None] * (2 * PAIRS) + channel
    weight = tl.load(place, mask=channel < 2 * PAIRS, other=0.0)
    word = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    even, odd = load_pairs(x_ptr, row * PAIRS + word, live & (word < PAIRS), BF16)
    even_weight, odd_weight = load_pairs(norm_ptr, word, word < PAIRS, BF16)
    even, odd = round_pairs(even_weight * (even * rstd), odd_weight * (odd * rstd), BF16, NATIVE)
    latent = dot_operand(even, odd, ROWS, CHUNK, BF16, NATIVE)
    key = tl.dot(latent, tl.trans(weight.to(latent.dtype)), key, input_precision="ieee")
    if TURNS:
        even, odd = rotate_pairs(even, odd, rotation_ptr, row, live, word - (PAIRS - TURNED), TURNED)
        even, odd = round_pairs(even, odd, BF16, NATIVE)
    store_rows(
        main_ptr, slot, live, even, odd, chunk * CHUNK, PAIRS, ROWS, CHUNK, 16, NVFP4, BF16, STORED, NATIVE
    )  # fmt: skip
    return key


@triton.jit
def _write_entries_kernel(
    x_ptr, norm_ptr, key_ptr, key_norm_ptr, rotation_ptr, slot_ptr, main_ptr, index_ptr, num_rows, eps,
    PAIRS: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, KEY: tl.constexpr, TURNED: tl.constexpr,
    BF16: tl.constexpr, STORED: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = WORDS // CHUNK
    # chunks that hold rotated pairs come last
    PLAIN: tl.constexpr = (PAIRS - TURNED) // CHUNK
    start = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    live = row < num_rows - start
    x_ptr += start * (PAIRS if BF16 else 2 * PAIRS)
    rotation_ptr += start * TURNED
    slot = tl.load(slot_ptr + start + row, mask=live, other=0).to(tl.int64)
    rstd = row_rstd(x_ptr, row * PAIRS, live, eps, PAIRS, WORDS, CHUNK, ROWS, BF16)
    key = tl.zeros((ROWS, KEY), tl.float32)
    for chunk in tl.range(0, PLAIN, num_stages=2):
        key = latent_chunk(
            chunk, key, x_ptr, norm_ptr, key_ptr, rotation_ptr, main_ptr, slot, row, live, rstd,
            PAIRS, CHUNK, KEY, TURNED, False, BF16, STORED, NATIVE, ROWS,
        )  # fmt: skip
    for chunk in tl.static_range(PLAIN, CHUNKS):
        key = latent_chunk(
            chunk, key, x_ptr, norm_ptr, key_ptr, rotation_ptr, main_ptr, slot, row, live, rstd,
            PAIRS, CHUNK, KEY, TURNED, True, BF16, STORED, NATIVE, ROWS,
        )  # fmt: skip
    even, odd = tl.split(tl.reshape(key, (ROWS, KEY // 2, 2)))
    if BF16:
        pair = pack_bf16(even, odd, NATIVE)
        even, odd = unpack_bf16(pair)
        even64, odd64 = squares(pair)
    else:
        even64, odd64 = even.to(tl.float64), odd.to(tl.float64)
    rstd = inverse_rms(tl.fma(odd64, odd64, even64 * even64), eps, KEY)
    word = tl.arange(0, KEY // 2)[None, :]
    even_weight, odd_weight = load_pairs(key_norm_ptr, word, word >= 0, BF16)
    even, odd = round_pairs(even_weight * (even * rstd), odd_weight * (odd * rstd), BF16, NATIVE)
    even, odd = rotate_pairs(even, odd, rotation_ptr, row, live, word - (KEY // 2 - TURNED), TURNED)
    even, odd = round_pairs(even, odd, BF16, NATIVE)
    store_rows(
        index_ptr, slot, live, even, odd, 0, KEY // 2, ROWS, KEY // 2, 32, MXFP4, BF16, STORED, NATIVE
    )  # fmt: skip


def write_entries(
    x: torch.Tensor,
    main: torch.Tensor,
    index: torch.Tensor,
    slots: torch.Tensor,
    rotation: torch.Tensor,
    *,
    norm: torch.Tensor,
    key: torch.Tensor,
    key_norm: torch.Tensor,
    eps: float,
    stored: bool = False,
    fused: bool = True,
) -> None:
    """Store the entries of compressor outputs.

    Args:
        x: [N, C] bf16 or fp32, the compressor's pooled projection.
        main: [S, C/2 + C/16] uint8, NVFP4 rows, written in place.
        index: [S, D/2 + D/32] uint8, MXFP4 rows, written in place; D a power of two.
        slots: [N] int32 or int64, different ones, the same in both tables.
        rotation: [N, P] complex64 factors at each entry's first token.
        norm, key, key_norm: [C], [D, C], [D] weights of the latent norm, the index key and its norm, in x.dtype.
        eps: of both norms.
        stored: the bytes that the cache's store writes of rounded values (see kernels/quant/write.py).
        fused: one kernel; else two around the index key's product, which needs less of the GPU's time on paper but
            has not been measured.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    num_rows, channels = x.shape
    index_channels = len(key)
    check_table("write_entries", main, "nvfp4", channels)
    check_table("write_entries", index, "mxfp4", index_channels)
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"write_entries: x must be bfloat16 or float32, got {x.dtype}")
    shapes = {"norm": [channels], "key": [index_channels, channels], "key_norm": [index_channels]}
    for (name, want), value in zip(shapes.items(), (norm, key, key_norm), strict=True):
        if list(value.shape) != want or value.dtype is not x.dtype:
            raise ValueError(f"write_entries: {name} must be {x.dtype} {want}, got {value.dtype} {list(value.shape)}")
    if list(slots.shape) != [num_rows] or rotation.dim() != 2 or len(rotation) != num_rows:
        raise ValueError(
            f"write_entries: {num_rows} entries need as many slots and rotations, got {len(slots)} and {len(rotation)}"
        )
    if index_channels & (index_channels - 1) or rotation.shape[1] > index_channels // 2:
        raise ValueError(
            f"write_entries: index keys need a power of two of at least {2 * rotation.shape[1]} channels, got {index_channels}"
        )
    if use_reference(x):
        write_entries_ref(
            x, main, index, slots, rotation, norm=norm, key=key, key_norm=key_norm, eps=eps, stored=stored
        )  # fmt: skip
        return
    if num_rows == 0:
        return
    if not fused:
        latent = torch.empty_like(x)
        write_rows(x, main, "nvfp4", slots=slots, norm=norm, eps=eps, rotation=rotation, normed=latent, stored=stored)
        index_key = F.linear(latent, key)
        write_rows(
            index_key, index, "mxfp4", slots=slots, norm=key_norm, eps=eps, rotation=rotation, stored=stored
        )  # fmt: skip
        return
    num_words = max(16, triton.next_power_of_2(channels // 2))
    block = 64 if num_words >= 64 else 16
    _write_entries_kernel[(triton.cdiv(num_rows, block),)](
        words(x.contiguous()), words(norm.contiguous()), key.contiguous(), words(key_norm.contiguous()),
        rotation.contiguous().view(torch.int64), slots, main, index, num_rows, eps,
        PAIRS=channels // 2, WORDS=num_words, CHUNK=min(num_words, 64), KEY=index_channels, TURNED=rotation.shape[1],
        BF16=x.dtype is torch.bfloat16, STORED=stored, NATIVE=not is_interpreted(), ROWS=block,
        num_warps=8 if block == 64 else 4, enable_fp_fusion=False, maxnreg=128,
    )  # fmt: skip
