"""Layouts, instructions and device functions that the Gluon forms of decode attention share. Shapes as in decode.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PRODUCER_REGISTERS, CONSUMER_REGISTERS = gl.constexpr(80), gl.constexpr(216)
"""Of a thread: 128 threads of the one and 256 of the other share 65,536; consumers hold 128 of outputs and 48 of logits."""
KEYS = gl.constexpr(64)
"""Keys of a tile."""
WINDOW_TILES, MAIN_TILES = gl.constexpr(2), gl.constexpr(8)
"""Most tiles of a row's window and of its selected entries."""
FOLD = gl.constexpr(2.0**8)
"""Keys are 2^-8 times their value: no power of two of bf16 lifts an E2M1 value from 2^-126 in one step."""
TWO_119 = gl.constexpr(2.0**119)
LOG2E = gl.constexpr(1.4426950408889634)

# four bytes of two E2M1 codes each -> even pairs $0 $1, odd pairs $2 $3 times 2^-126, times the scale $5
UNPACK_FP4 = gl.constexpr("""{
.reg .b32 s, t, u, v;
prmt.b32 s, $4, 0, 0x1404;
prmt.b32 t, $4, 0, 0x3424;
and.b32 u, s, 0x80008000; shr.b32 v, s, 6; and.b32 v, v, 0x01C001C0; or.b32 u, u, v; mul.rn.bf16x2 $2, u, $5;
and.b32 u, t, 0x80008000; shr.b32 v, t, 6; and.b32 v, v, 0x01C001C0; or.b32 u, u, v; mul.rn.bf16x2 $3, u, $5;
shl.b32 u, s, 4; and.b32 u, u, 0x80008000; shr.b32 v, s, 2; and.b32 v, v, 0x01C001C0; or.b32 u, u, v;
mul.rn.bf16x2 $0, u, $5;
shl.b32 u, t, 4; and.b32 u, u, 0x80008000; shr.b32 v, t, 2; and.b32 v, v, 0x01C001C0; or.b32 u, u, v;
mul.rn.bf16x2 $1, u, $5;
}""")
# four E4M3 bytes -> an even pair $0 and an odd pair $1 times 2^-120, times 2^112 and the scale $3
UNPACK_FP8 = gl.constexpr("""{
.reg .b32 s, u, v, w;
mov.b32 w, 0x77807780;
shl.b32 s, $2, 8;
and.b32 u, s, 0x80008000; shr.b32 v, s, 4; and.b32 v, v, 0x07F007F0; or.b32 u, u, v;
mul.rn.bf16x2 u, u, w; mul.rn.bf16x2 $0, u, $3;
and.b32 u, $2, 0x80008000; shr.b32 v, $2, 4; and.b32 v, v, 0x07F007F0; or.b32 u, u, v;
mul.rn.bf16x2 u, u, w; mul.rn.bf16x2 $1, u, $3;
}""")
# two words (even, odd) of neighbours -> (even, even), (odd, odd)
SEPARATE = gl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")
PAIR_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")

QUERIES = gl.constexpr(gl.BlockedLayout([1, 2, 2], [1, 32, 1], [4, 1, 1], [2, 1, 0]))
"""[32 heads, 128, 2 words]."""
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16))
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# the name changed after Triton 3.6
barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def pair_bf16(even, odd):
    """fp32 pairs -> words of two bf16."""
    return gl.inline_asm_elementwise(PAIR_BF16, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def places(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. COUNT-1 along the last of three axes, [1, 1, COUNT]."""
    last: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    return gl.expand_dims(gl.expand_dims(gl.arange(0, COUNT, layout=last), 0), 1)


@gluon.jit
def load_queries(ptr, words):
    """Words (even, odd) [32, 256] of half of the heads -> half a tile, seen as words, even channels first."""
    half: gl.constexpr = gl.SliceLayout(2, QUERIES)
    head = gl.arange(0, 32, layout=gl.SliceLayout(1, half))[:, None]
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, half))[None, :]
    first, second = gl.split(gl.load(ptr + gl.expand_dims(head * 256 + word * 2, 2) + places(2, QUERIES)))
    even, odd = gl.inline_asm_elementwise(
        SEPARATE, "=r,=r,r,r", [first, second], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    words.slice(0, 128, 1).store(even)
    words.slice(128, 128, 1).store(odd)


@gluon.jit
def softmax_step(logits, bias, scale, top, total):
    """Probabilities of a tile, the factor of what came before, the new maximum and sum."""
    logits = logits * scale + bias[None, :]
    new_top = gl.maximum(top, gl.max(logits, 1))
    # while no key is known the reference point is 0: -inf minus -inf has no value
    point = gl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = gl.exp2(top - point)
    probs = gl.exp2(logits - point[:, None])
    return probs, shrink, new_top, total * shrink + gl.sum(probs, 1)


@gluon.jit
def main_scale(code):
    """Scale codes (int32) of FP4 rows -> words of the doubled bf16 factor that lifts unpacked codes to keys."""
    # an E4M3 code has fp32's exponent and mantissa, 2^-120 down; a code of E2M1 is 2^-126 down; keys carry 2^-8
    value = ((code << 20).to(gl.float32, bitcast=True) * TWO_119) * TWO_119
    return pair_bf16(value, value)


@gluon.jit
def window_scale(code):
    """Scale codes (int32) of FP8 rows -> words of the doubled bf16 scale."""
    value = gl.where(code == 0, 0x400000, code << 23).to(gl.float32, bitcast=True)
    return pair_bf16(value, value)


@gluon.jit
def store_words(out_ptr, acc_even, acc_odd, factor, PART: gl.constexpr):
    """Outputs of one consumer: words 128 * PART .. 128 * PART + 128 of 64 heads, times a factor [64, 1]."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))[:, None]
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, ACC))[None, :]
    gl.store(out_ptr + row * 256 + (128 * PART + word), pair_bf16(acc_even * factor, acc_odd * factor))


@gluon.jit
def last_factor(sink_ptr, lse_ptr, top, total, PART: gl.constexpr, PARTIAL: gl.constexpr):
    """What outputs are multiplied by at the end [64]: with the sink, or for a part, whose log2 of the sum is stored."""
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
    if PARTIAL:
        factor = gl.where(total == 0.0, 0.0, 1.0 / total) * FOLD
        if PART == 0:
            gl.store(lse_ptr + head, top + gl.log2(total))
    else:
        sink = gl.load(sink_ptr + head) * LOG2E
        point = gl.maximum(top, sink)
        kept = gl.exp2(top - point)
        factor = kept / (total * kept + gl.exp2(sink - point)) * FOLD
    return factor
