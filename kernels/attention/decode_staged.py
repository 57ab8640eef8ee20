"""The staged Gluon form of sparse decode attention for Hopper: as decode_hopper.py, and no register is spilled.

Beside 200 KB of shared memory there is no L1 cache: what decode_hopper.py spills goes to L2 and back, and its producer
waits for every row before it may spill it. Here FP4 rows are copied to shared memory without passing registers, each
consumer unpacks one tile of the window while its accumulators do not exist yet, and addresses are computed in place.
Compiles to 0 spilled bytes; not yet run on a GPU, so nothing chooses it (decode.py, `form="staged"`).
Shapes as in decode.py. Twin: the plain form.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from burnish.kernels.attention.hopper import (
    ACC,
    CONSUMER_REGISTERS,
    FLAT,
    FOLD,
    KEYS,
    LINE,
    LOGITS,
    MAIN_TILES,
    PRODUCER_REGISTERS,
    TILE,
    UNPACK_FP4,
    UNPACK_FP8,
    WINDOW_TILES,
    WORDS,
    barrier,
    last_factor,
    load_queries,
    main_scale,
    places,
    softmax_step,
    store_words,
    window_scale,
)

_RAW4 = gl.constexpr(gl.BlockedLayout([4, 1, 2], [1, 32, 1], [4, 1, 1], [2, 1, 0]))
"""[16 keys, 32 groups, 2 words] of FP4 rows: a thread holds one group of 4 keys, a warp 4 whole keys."""
_RAW4_WORDS = gl.constexpr(gl.BlockedLayout([4, 2], [1, 32], [4, 1], [1, 0]))
"""The same values as [16 keys, 64 words]."""
_RAW8 = gl.constexpr(gl.BlockedLayout([8, 1, 4], [1, 16, 2], [4, 1, 1], [2, 1, 0]))
"""[32 keys, 16 groups, 8 words] of FP8 rows: half a group of 8 keys a thread."""
_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
"""[64 keys, 64 words]: 16 bytes a thread."""
_COPY_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))
"""[64 keys, 8 words]."""
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))


@gluon.jit
def stage_main(table_words_ptr, slots, payload, scales):
    """Start the copy of the 64 FP4 rows in `slots` (shared memory); slot -1 copies row 0."""
    at = gl.maximum(slots.load(gl.SliceLayout(1, _COPY)), 0).to(gl.int64)[:, None]
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))[None, :]
    async_copy.async_copy_global_to_shared(payload, table_words_ptr + (at * 72 + word))
    at = gl.maximum(slots.load(gl.SliceLayout(1, _COPY_SCALES)), 0).to(gl.int64)[:, None]
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, _COPY_SCALES))[None, :]
    async_copy.async_copy_global_to_shared(scales, table_words_ptr + (at * 72 + (64 + word)))
    async_copy.commit_group()


@gluon.jit
def unpack_main(words, payload, codes):
    """16 copied FP4 rows -> rows of a key tile, seen as words [16, 256]."""
    word = gl.convert_layout(gl.reshape(payload.load(_RAW4_WORDS), [16, 32, 2]), _RAW4, assert_trivial=True)
    code = codes.load(gl.SliceLayout(2, _RAW4)).to(gl.int32)
    scale, word = gl.broadcast(gl.expand_dims(main_scale(code), 2), word)
    even0, even1, odd0, odd1 = gl.inline_asm_elementwise(
        UNPACK_FP4, "=r,=r,=r,=r,r,r", [word, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    words.slice(0, 128, 1).store(gl.reshape(gl.join(even0, even1), [16, 128]))
    words.slice(128, 128, 1).store(gl.reshape(gl.join(odd0, odd1), [16, 128]))


@gluon.jit
def load_window(words_ptr, codes_ptr, slot_ptr, start, limit):
    """Payload words [32, 16, 8] and scale codes [32, 16] of the FP8 rows in slots start .. start + 32.

    Slot -1, and a slot past the limit, reads row 0 with scale codes 0.
    """
    key = start + gl.arange(0, 32, layout=gl.SliceLayout(1, gl.SliceLayout(2, _RAW8)))
    slot = gl.load(slot_ptr + key, mask=key < limit, other=-1)
    at = gl.maximum(slot, 0).to(gl.int64)[:, None]
    group = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, _RAW8)))[None, :]
    code = gl.load(codes_ptr + at * 528 + group, mask=(slot >= 0)[:, None], other=0)
    return gl.load(words_ptr + gl.expand_dims(at * 132 + group * 8, 2) + places(8, _RAW8)), code


@gluon.jit
def unpack_window(words, word, code):
    """32 FP8 rows -> rows of a key tile, seen as words [32, 256]."""
    scale, word = gl.broadcast(gl.expand_dims(window_scale(code.to(gl.int32)), 2), word)
    even, odd = gl.inline_asm_elementwise(
        UNPACK_FP8, "=r,=r,r,r", [word, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    words.slice(0, 128, 1).store(gl.reshape(even, [32, 128]))
    words.slice(128, 128, 1).store(gl.reshape(odd, [32, 128]))


@gluon.jit
def load_slots(ptr, start, limit, bias):
    """Slots of a tile, -1 at and past `limit`; its logit biases (0, or -inf where there is no key) are stored."""
    key = start + gl.arange(0, 64, layout=FLAT)
    slot = gl.load(ptr + key, mask=key < limit, other=-1)
    bias.store(gl.where(slot >= 0, 0.0, float("-inf")))
    return slot


@gluon.jit
def produce(
    table_words_ptr, selected_ptr, slots, bias, payload, scales, words, full, empty, tile, main_low, main_high, limit
):
    """Tiles of the selected entries, one after another into the two buffers; the first is tile number `tile`."""
    codes = scales._reinterpret(gl.uint8, [64, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for block in gl.static_range(MAIN_TILES):
        slots.index(block).store(load_slots(selected_ptr, block * KEYS, limit, bias.index(WINDOW_TILES + block)))
    barrier()
    stage_main(table_words_ptr, slots.index(main_low), payload, scales)
    for block in range(main_low, main_high):
        buffer = tile & 1
        async_copy.wait_group(0)
        barrier()
        mbarrier.wait(empty.index(buffer), ((tile >> 1) & 1) ^ 1)
        for quarter in gl.static_range(4):
            unpack_main(
                words.index(buffer).slice(16 * quarter, 16, 0),
                payload.slice(16 * quarter, 16, 0),
                codes.slice(16 * quarter, 16, 0),
            )
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(buffer), count=1)
        stage_main(table_words_ptr, slots.index(gl.minimum(block + 1, MAIN_TILES - 1)), payload, scales)
        tile += 1
    async_copy.wait_group(0)


@gluon.jit
def consume(
    q_ptr, ring_words_ptr, ring_ptr, window_ptr, sink_ptr, out_ptr, lse_ptr, queries, keys, bias, full, empty,
    queries_full, window_low, window_high, main_low, main_high, limit, scale,
    PART: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """All logits and value words 128 * PART .. 128 * PART + 128 of one query row."""
    columns: gl.constexpr = gl.SliceLayout(0, LOGITS)
    acc_rows: gl.constexpr = gl.SliceLayout(1, ACC)
    operand: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    num_window = window_high - window_low
    num_tiles = num_window + (main_high - main_low)
    query_words = queries._reinterpret(gl.int32, [1, 64, 256], WORDS).index(0)
    load_queries(q_ptr + PART * 8192, query_words.slice(32 * PART, 32, 0))
    fence_async_shared()
    barrier()
    mbarrier.arrive(queries_full, count=1)
    # one tile of the window, if there is one; tiles and buffers have the same number here
    for tile in range(PART, gl.minimum(num_window, PART + 1)):
        start = (window_low + tile) * KEYS
        load_slots(window_ptr, start, limit, bias.index(window_low + tile))
        words = keys._reinterpret(gl.int32, [2, 64, 256], WORDS).index(tile)
        raw0, code0 = load_window(ring_words_ptr, ring_ptr + 512, window_ptr, start, limit)
        raw1, code1 = load_window(ring_words_ptr, ring_ptr + 512, window_ptr, start + 32, limit)
        unpack_window(words.slice(0, 32, 0), raw0, code0)
        unpack_window(words.slice(32, 32, 0), raw1, code1)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(tile), count=1)
    acc_even = gl.zeros([64, 128], gl.float32, ACC)
    acc_odd = gl.zeros([64, 128], gl.float32, ACC)
    none = gl.zeros([64, 64], gl.float32, LOGITS)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, LOGITS))
    mbarrier.wait(queries_full, 0)
    mbarrier.wait(full.index(0), 0)
    product = warpgroup_mma(queries.index(0), keys.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    logits = warpgroup_mma_wait(0, deps=[product])
    for tile in range(0, num_tiles - 1):
        buffer, following = tile & 1, (tile + 1) & 1
        at = gl.where(tile < num_window, window_low + tile, WINDOW_TILES + main_low + tile - num_window)
        probs, shrink, top, total = softmax_step(logits, bias.index(at).load(columns), scale, top, total)
        probs = gl.convert_layout(probs.to(gl.bfloat16), operand)
        shrink = gl.convert_layout(shrink, acc_rows)[:, None]
        value = keys.index(buffer)
        weighted_even = warpgroup_mma(probs, value.slice(128 * PART, 128, 1), acc_even * shrink, is_async=True)
        weighted_odd = warpgroup_mma(probs, value.slice(256 + 128 * PART, 128, 1), acc_odd * shrink, is_async=True)
        mbarrier.wait(full.index(following), ((tile + 1) >> 1) & 1)
        # index 0, but not for the compiler: it would keep the addresses of all 32 steps in registers across tiles
        query = queries.index(tile >> 16)
        product = warpgroup_mma(query, keys.index(following).permute((1, 0)), none, use_acc=False, is_async=True)
        acc_even, acc_odd, probs = warpgroup_mma_wait(1, deps=[weighted_even, weighted_odd, probs])
        barrier()
        mbarrier.arrive(empty.index(buffer), count=1)
        logits = warpgroup_mma_wait(0, deps=[product])
    tile = num_tiles - 1
    at = gl.where(tile < num_window, window_low + tile, WINDOW_TILES + main_low + tile - num_window)
    probs, shrink, top, total = softmax_step(logits, bias.index(at).load(columns), scale, top, total)
    probs = gl.convert_layout(probs.to(gl.bfloat16), operand)
    shrink = gl.convert_layout(shrink, acc_rows)[:, None]
    value = keys.index(tile & 1)
    weighted_even = warpgroup_mma(probs, value.slice(128 * PART, 128, 1), acc_even * shrink, is_async=True)
    weighted_odd = warpgroup_mma(probs, value.slice(256 + 128 * PART, 128, 1), acc_odd * shrink, is_async=True)
    acc_even, acc_odd, probs = warpgroup_mma_wait(0, deps=[weighted_even, weighted_odd, probs])

    factor = last_factor(sink_ptr, lse_ptr, top, total, PART, PARTIAL)
    store_words(out_ptr, acc_even, acc_odd, gl.convert_layout(factor, acc_rows)[:, None], PART)


# roles take no compile-time arguments: one function each
@gluon.jit
def consume_first(
    q_ptr, ring_words_ptr, ring_ptr, window_ptr, sink_ptr, out_ptr, lse_ptr, queries, keys, bias, full, empty,
    queries_full, window_low, window_high, main_low, main_high, limit, scale,
):  # fmt: skip
    consume(
        q_ptr, ring_words_ptr, ring_ptr, window_ptr, sink_ptr, out_ptr, lse_ptr, queries, keys, bias, full, empty,
        queries_full, window_low, window_high, main_low, main_high, limit, scale, 0, False,
    )  # fmt: skip


@gluon.jit
def consume_second(
    q_ptr, ring_words_ptr, ring_ptr, window_ptr, sink_ptr, out_ptr, lse_ptr, queries, keys, bias, full, empty,
    queries_full, window_low, window_high, main_low, main_high, limit, scale,
):  # fmt: skip
    consume(
        q_ptr, ring_words_ptr, ring_ptr, window_ptr, sink_ptr, out_ptr, lse_ptr, queries, keys, bias, full, empty,
        queries_full, window_low, window_high, main_low, main_high, limit, scale, 1, False,
    )  # fmt: skip


@gluon.jit
def consume_first_of_part(
    q_ptr, ring_words_ptr, ring_ptr, window_ptr, sink_ptr, out_ptr, lse_ptr, queries, keys, bias, full, empty,
    queries_full, window_low, window_high, main_low, main_high, limit, scale,
):  # fmt: skip
    consume(
        q_ptr, ring_words_ptr, ring_ptr, window_ptr, sink_ptr, out_ptr, lse_ptr, queries, keys, bias, full, empty,
        queries_full, window_low, window_high, main_low, main_high, limit, scale, 0, True,
    )  # fmt: skip


@gluon.jit
def consume_second_of_part(
    q_ptr, ring_words_ptr, ring_ptr, window_ptr, sink_ptr, out_ptr, lse_ptr, queries, keys, bias, full, empty,
    queries_full, window_low, window_high, main_low, main_high, limit, scale,
):  # fmt: skip
    consume(
        q_ptr, ring_words_ptr, ring_ptr, window_ptr, sink_ptr, out_ptr, lse_ptr, queries, keys, bias, full, empty,
        queries_full, window_low, window_high, main_low, main_high, limit, scale, 1, True,
    )  # fmt: skip


@gluon.jit
def decode_kernel(
    q_ptr, ring_words_ptr, ring_ptr, window_ptr, table_words_ptr, selected_ptr, sink_ptr, out_ptr, lse_ptr,
    num_window, num_selected, scale, SPLITS: gl.constexpr,
):  # fmt: skip
    """One query row and one range of its key tiles; `*_words_ptr` see the same bytes as 32-bit words.

    Tiles of the window come first, then those of the selected entries. With several splits `out_ptr` [R, SPLITS, ...]
    takes what each would put out alone and `lse_ptr` its log2 of the sum.
    """
    row, split = gl.program_id(0).to(gl.int64), gl.program_id(1)
    window_tiles = (num_window + KEYS - 1) // KEYS
    num_tiles = window_tiles + (num_selected + KEYS - 1) // KEYS
    first, last = split * num_tiles // SPLITS, (split + 1) * num_tiles // SPLITS
    window_low, window_high = gl.minimum(first, window_tiles), gl.minimum(last, window_tiles)
    main_low, main_high = gl.maximum(first - window_tiles, 0), gl.maximum(last - window_tiles, 0)
    limit_window, limit_main = gl.minimum(num_window, window_high * KEYS), gl.minimum(num_selected, main_high * KEYS)
    # a split without a tile runs one that has no key
    main_low = gl.minimum(main_low, MAIN_TILES - 1)
    main_high = gl.maximum(main_high, main_low + 1 - (window_high - window_low))

    queries = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], TILE)
    words = keys._reinterpret(gl.int32, [2, 64, 256], WORDS)
    payload = gl.allocate_shared_memory(gl.int32, [64, 64], _PLAIN)
    scales = gl.allocate_shared_memory(gl.int32, [64, 8], _PLAIN)
    slots = gl.allocate_shared_memory(gl.int32, [8, 64], LINE)
    # of every tile, the window's first
    bias = gl.allocate_shared_memory(gl.float32, [10, 64], LINE)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    queries_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=2)
    mbarrier.init(queries_full, count=2)
    part = row * SPLITS + split
    consumer_args = (
        q_ptr + row * 16384, ring_words_ptr, ring_ptr, window_ptr + row * num_window, sink_ptr, out_ptr + part * 16384,
        lse_ptr + part * 64, queries, keys, bias, full, empty, queries_full, window_low, window_high, main_low,
        main_high, limit_window, scale * FOLD,
    )  # fmt: skip
    producer_args = (
        table_words_ptr, selected_ptr + row * num_selected, slots, bias, payload, scales, words, full, empty,
        window_high - window_low, main_low, main_high, limit_main,
    )  # fmt: skip
    if SPLITS == 1:
        gl.warp_specialize(
            [(consume_first, consumer_args), (consume_second, consumer_args), (produce, producer_args)],
            [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume_first_of_part, consumer_args), (consume_second_of_part, consumer_args), (produce, producer_args)],
            [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
