"""The Gluon form of sparse decode attention for Hopper: 64 heads of 512 channels, warps with roles.

Same work as decode.py, cut as the hardware wants it. One warpgroup gathers rows, unpacks them into bf16 and keeps two
tiles of 64 keys full; two warpgroups consume them, each with all logits and half of the value channels, so that
neither waits for the other: no reduction leaves a warpgroup, probabilities never leave its registers, and one's
softmax runs beside the other's products. A tile is [64, 512], even channels first; both products read it.
Barriers: `full` (tile written), `empty` (both consumers done). Shapes as in decode.py. Twin: the plain form.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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

_RAW4 = gl.constexpr(gl.BlockedLayout([8, 1, 2], [1, 32, 1], [4, 1, 1], [2, 1, 0]))
"""[32 keys, 32 groups, 2 words] of FP4 rows: a thread holds one group of 8 keys, a warp 8 whole keys."""
_RAW8 = gl.constexpr(gl.BlockedLayout([8, 1, 4], [1, 16, 2], [4, 1, 1], [2, 1, 0]))
"""[32 keys, 16 groups, 8 words] of FP8 rows: half a group of 8 keys a thread."""


@gluon.jit
def load_rows(words_ptr, codes_ptr, slots, ROW_WORDS: gl.constexpr, GROUPS: gl.constexpr, LAYOUT: gl.constexpr):
    """Payload words [32, GROUPS, words of a group] and scale codes [32, GROUPS] of the rows in `slots` (shared memory).

    `words_ptr` and `codes_ptr` point to the payload and to the scales of row 0, in words and bytes. Slot -1 reads row 0
    with scale codes 0.
    """
    GROUP_WORDS: gl.constexpr = (ROW_WORDS * 4 - GROUPS) // 4 // GROUPS
    slot = slots.load(gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    at = gl.maximum(slot, 0).to(gl.int64)[:, None]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :]
    code = gl.load(codes_ptr + at * (ROW_WORDS * 4) + group, mask=(slot >= 0)[:, None], other=0)
    first = gl.expand_dims(at * ROW_WORDS + group * GROUP_WORDS, 2)
    return gl.load(words_ptr + first + places(GROUP_WORDS, LAYOUT)), code


@gluon.jit
def store_main(words, word, code):
    """Unpack FP4 rows into half a tile, seen as words [32, 256]."""
    scale, word = gl.broadcast(gl.expand_dims(main_scale(code.to(gl.int32)), 2), word)
    even0, even1, odd0, odd1 = gl.inline_asm_elementwise(
        UNPACK_FP4, "=r,=r,=r,=r,r,r", [word, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    words.slice(0, 128, 1).store(gl.reshape(gl.join(even0, even1), [32, 128]))
    words.slice(128, 128, 1).store(gl.reshape(gl.join(odd0, odd1), [32, 128]))


@gluon.jit
def store_window(words, word, code):
    """Unpack FP8 rows into half a tile, seen as words [32, 256]."""
    scale, word = gl.broadcast(gl.expand_dims(window_scale(code.to(gl.int32)), 2), word)
    even, odd = gl.inline_asm_elementwise(
        UNPACK_FP8, "=r,=r,r,r", [word, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    words.slice(0, 128, 1).store(gl.reshape(even, [32, 128]))
    words.slice(128, 128, 1).store(gl.reshape(odd, [32, 128]))


@gluon.jit
def store_slots(ptr, low, high, slots, bias, FIRST: gl.constexpr, TILES: gl.constexpr):
    """Slots and logit biases (0, or -inf where there is no key) of places low .. high; -1 elsewhere."""
    for half in gl.static_range(2 * TILES):
        key = half * 32 + gl.arange(0, 32, layout=FLAT)
        slots.index(2 * FIRST + half).store(gl.load(ptr + key, mask=(key >= low) & (key < high), other=-1))
    for tile in gl.static_range(TILES):
        key = tile * KEYS + gl.arange(0, 64, layout=FLAT)
        slot = gl.load(ptr + key, mask=(key >= low) & (key < high), other=-1)
        bias.index(FIRST + tile).store(gl.where(slot >= 0, 0.0, float("-inf")))


@gluon.jit
def produce(
    ring_words_ptr, ring_ptr, window_ptr, table_words_ptr, table_ptr, selected_ptr, slots, bias, words, full, empty,
    window_low, window_high, main_low, main_high, limit_window, limit_main,
):  # fmt: skip
    """Tiles of the window, then of the selected entries, one after another into the two buffers."""
    store_slots(window_ptr, window_low * KEYS, limit_window, slots, bias, 0, WINDOW_TILES)
    store_slots(selected_ptr, main_low * KEYS, limit_main, slots, bias, WINDOW_TILES, MAIN_TILES)
    barrier()
    tile = 0
    for block in range(window_low, window_high):
        raw0, code0 = load_rows(ring_words_ptr, ring_ptr + 512, slots.index(2 * block), 132, 16, _RAW8)
        raw1, code1 = load_rows(ring_words_ptr, ring_ptr + 512, slots.index(2 * block + 1), 132, 16, _RAW8)
        buffer = tile & 1
        mbarrier.wait(empty.index(buffer), ((tile >> 1) & 1) ^ 1)
        store_window(words.index(buffer).slice(0, 32, 0), raw0, code0)
        store_window(words.index(buffer).slice(32, 32, 0), raw1, code1)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(buffer), count=1)
        tile += 1
    half = 2 * (WINDOW_TILES + main_low)
    raw0, code0 = load_rows(table_words_ptr, table_ptr + 256, slots.index(half), 72, 32, _RAW4)
    raw1, code1 = load_rows(table_words_ptr, table_ptr + 256, slots.index(half + 1), 72, 32, _RAW4)
    for block in range(main_low, main_high):
        buffer = tile & 1
        mbarrier.wait(empty.index(buffer), ((tile >> 1) & 1) ^ 1)
        store_main(words.index(buffer).slice(0, 32, 0), raw0, code0)
        store_main(words.index(buffer).slice(32, 32, 0), raw1, code1)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(buffer), count=1)
        # after the fence, which waits for loads too; the next wait for a buffer hides them
        half = 2 * (WINDOW_TILES + gl.minimum(block + 1, MAIN_TILES - 1))
        raw0, code0 = load_rows(table_words_ptr, table_ptr + 256, slots.index(half), 72, 32, _RAW4)
        raw1, code1 = load_rows(table_words_ptr, table_ptr + 256, slots.index(half + 1), 72, 32, _RAW4)
        tile += 1


@gluon.jit
def consume(
    q_ptr, sink_ptr, out_ptr, lse_ptr, queries, query_words, keys, bias_tiles, full, empty, queries_full,
    window_low, window_high, main_low, main_high, scale, PART: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """All logits and value words 128 * PART .. 128 * PART + 128 of one query row."""
    columns: gl.constexpr = gl.SliceLayout(0, LOGITS)
    acc_rows: gl.constexpr = gl.SliceLayout(1, ACC)
    operand: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    load_queries(q_ptr + PART * 8192, query_words.slice(32 * PART, 32, 0))
    fence_async_shared()
    barrier()
    mbarrier.arrive(queries_full, count=1)
    acc_even = gl.zeros([64, 128], gl.float32, ACC)
    acc_odd = gl.zeros([64, 128], gl.float32, ACC)
    none = gl.zeros([64, 64], gl.float32, LOGITS)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, LOGITS))
    num_window = window_high - window_low
    num_tiles = num_window + (main_high - main_low)
    mbarrier.wait(queries_full, 0)
    mbarrier.wait(full.index(0), 0)
    product = warpgroup_mma(queries, keys.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    logits = warpgroup_mma_wait(0, deps=[product])
    for tile in range(0, num_tiles - 1):
        buffer, following = tile & 1, (tile + 1) & 1
        at = gl.where(tile < num_window, window_low + tile, WINDOW_TILES + main_low + tile - num_window)
        probs, shrink, top, total = softmax_step(logits, bias_tiles.index(at).load(columns), scale, top, total)
        probs = gl.convert_layout(probs.to(gl.bfloat16), operand)
        shrink = gl.convert_layout(shrink, acc_rows)[:, None]
        value = keys.index(buffer)
        weighted_even = warpgroup_mma(probs, value.slice(128 * PART, 128, 1), acc_even * shrink, is_async=True)
        weighted_odd = warpgroup_mma(probs, value.slice(256 + 128 * PART, 128, 1), acc_odd * shrink, is_async=True)
        mbarrier.wait(full.index(following), ((tile + 1) >> 1) & 1)
        product = warpgroup_mma(queries, keys.index(following).permute((1, 0)), none, use_acc=False, is_async=True)
        acc_even, acc_odd, probs = warpgroup_mma_wait(1, deps=[weighted_even, weighted_odd, probs])
        barrier()
        mbarrier.arrive(empty.index(buffer), count=1)
        logits = warpgroup_mma_wait(0, deps=[product])
    tile = num_tiles - 1
    at = gl.where(tile < num_window, window_low + tile, WINDOW_TILES + main_low + tile - num_window)
    probs, shrink, top, total = softmax_step(logits, bias_tiles.index(at).load(columns), scale, top, total)
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
    q_ptr, sink_ptr, out_ptr, lse_ptr, queries, query_words, keys, bias_tiles, full, empty, queries_full,
    window_low, window_high, main_low, main_high, scale,
):  # fmt: skip
    consume(
        q_ptr, sink_ptr, out_ptr, lse_ptr, queries, query_words, keys, bias_tiles, full, empty, queries_full,
        window_low, window_high, main_low, main_high, scale, 0, False,
    )  # fmt: skip


@gluon.jit
def consume_second(
    q_ptr, sink_ptr, out_ptr, lse_ptr, queries, query_words, keys, bias_tiles, full, empty, queries_full,
    window_low, window_high, main_low, main_high, scale,
):  # fmt: skip
    consume(
        q_ptr, sink_ptr, out_ptr, lse_ptr, queries, query_words, keys, bias_tiles, full, empty, queries_full,
        window_low, window_high, main_low, main_high, scale, 1, False,
    )  # fmt: skip


@gluon.jit
def consume_first_of_part(
    q_ptr, sink_ptr, out_ptr, lse_ptr, queries, query_words, keys, bias_tiles, full, empty, queries_full,
    window_low, window_high, main_low, main_high, scale,
):  # fmt: skip
    consume(
        q_ptr, sink_ptr, out_ptr, lse_ptr, queries, query_words, keys, bias_tiles, full, empty, queries_full,
        window_low, window_high, main_low, main_high, scale, 0, True,
    )  # fmt: skip


@gluon.jit
def consume_second_of_part(
    q_ptr, sink_ptr, out_ptr, lse_ptr, queries, query_words, keys, bias_tiles, full, empty, queries_full,
    window_low, window_high, main_low, main_high, scale,
):  # fmt: skip
    consume(
        q_ptr, sink_ptr, out_ptr, lse_ptr, queries, query_words, keys, bias_tiles, full, empty, queries_full,
        window_low, window_high, main_low, main_high, scale, 1, True,
    )  # fmt: skip


@gluon.jit
def decode_kernel(
    q_ptr, ring_words_ptr, ring_ptr, window_ptr, table_words_ptr, table_ptr, selected_ptr, sink_ptr, out_ptr, lse_ptr,
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

    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 512], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], TILE)
    words = keys._reinterpret(gl.int32, [2, 64, 256], WORDS)
    query_words = queries._reinterpret(gl.int32, [64, 256], WORDS)
    # of every half tile and of every tile, the window's first
    slots = gl.allocate_shared_memory(gl.int32, [20, 32], LINE)
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
        q_ptr + row * 16384, sink_ptr, out_ptr + part * 16384, lse_ptr + part * 64, queries, query_words, keys,
        bias, full, empty, queries_full, window_low, window_high, main_low, main_high, scale * FOLD,
    )  # fmt: skip
    producer_args = (
        ring_words_ptr, ring_ptr, window_ptr + row * num_window, table_words_ptr, table_ptr,
        selected_ptr + row * num_selected, slots, bias, words, full, empty,
        window_low, window_high, main_low, main_high, limit_window, limit_main,
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
