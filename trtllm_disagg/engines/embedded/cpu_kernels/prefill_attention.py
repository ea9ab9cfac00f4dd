"""Causal attention of prompt tokens over the paged pool, by tiles of queries (numba and LLVM IR, CPU).

A tile is up to 64 queries of one KV head: of each token the query heads that share it. Queries lie side by side in the
lanes of vectors, and each key and value of the pool is multiplied with all of them. A query's maximum, sum and masked
keys are arithmetic of its own lane. Keys come in chunks, and sums continue from chunk to chunk as in FlashAttention
(Dao et al., 2022): a larger score scales the earlier sums.

A chunk begins at a multiple of its length, and lanes are independent. So a query's bits depend only on its position,
not on where its prompt was cut or on the other queries of its tile.

Keys and values enter as float32, or as pairs of bfloat16 if the processor multiplies these. The first part of this file
emits a tile's building blocks as LLVM IR.
"""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compile_unless_locked, compiled
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.cpu_kernels.layer_kernels import pack
from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import (
    CACHE_LINE,
    F32,
    FLOAT32,
    FLOATS,
    I32,
    I64,
    LANES,
    LOWEST,
    WORDS,
    Arithmetic,
    constant,
    emit_exp,
    emit_in_steps,
    emit_loop,
    load_float32,
    loader_of,
    outlined,
    pointer,
    splat,
)
from trtllm_disagg.engines.embedded.cpu_kernels.parallel import in_parts

#: Queries of a tile, and keys of a chunk. A row of lanes has one number of each query.
QUERIES, KEYS = 64, 64
#: Bytes from a row of lanes to the next one.
ROW_BYTES = 4 * QUERIES
#: By the number of vectors of lanes at a time: keys, or dimensions, that are multiplied with them in registers.
_BLOCKS = {4: 4, 1: 8} if this_cpu().level == "avx512" else {1: 4}
_VECTORS = max(_BLOCKS)
#: Keys are computed in groups of this size; those beyond the last key are masked.
KEY_STEP = max(_BLOCKS.values())
#: Rows of the lanes' state: what each lane's query sees, its largest score and sum so far, and by how much the last
#: chunk has scaled them; behind these are the scale of scores and their softcap.
POSITION, START, TOP, TOTAL, FACTOR, SETTINGS, STATE_ROWS = range(7)
#: Beyond it tanh is one, in float32.
_FLAT = 10.0


def _at(b: Any, address: Any, index: Any, stride: int) -> Any:
    return b.add(address, b.mul(index, I64(stride)))


def _emit_product(
    b: Any,
    arithmetic: Arithmetic,
    numbers: Any,
    number_stride: Any,
    step_stride: Any,
    rows: Any,
    lanes: Any,
    vectors: Any,
    steps: Any,
    out: Any,
    factors: Any | None,
) -> None:
    """out[i] = factors * out[i] + the sum over j of numbers[i, j] * lanes[j], for each of `rows` i; no factors: zero.

    `lanes` and `out` are rows of `vectors` vectors; `numbers` are broadcast to all lanes.
    """

    def some_lanes(v: Any, width: int) -> None:
        def some_rows(i: Any, height: int) -> None:
            line = _at(b, lanes, v, CACHE_LINE)
            first = b.add(numbers, b.mul(i, number_stride))
            starts = [b.add(first, b.mul(number_stride, I64(k))) for k in range(height)]
            begin = _at(b, _at(b, out, i, ROW_BYTES), v, CACHE_LINE)
            places = [
                [pointer(b, b.add(begin, I64(k * ROW_BYTES + n * CACHE_LINE)), FLOATS) for n in range(width)]
                for k in range(height)
            ]
            sums = [constant(FLOATS, 0.0)] * (height * width)
            if factors is not None:
                scaled_by = _at(b, factors, v, CACHE_LINE)
                scale = [load_float32(b, b.add(scaled_by, I64(n * CACHE_LINE)), True) for n in range(width)]
                before = [[b.load(place, align=4) for place in row] for row in places]
                sums = [b.fmul(*pair) for row in before for pair in zip(row, scale, strict=True)]

            def step(j: Any, totals: list[Any]) -> list[Any]:
                here = _at(b, line, j, ROW_BYTES)
                many = [arithmetic.emit_weights(b, b.add(here, I64(n * CACHE_LINE))) for n in range(width)]
                offset = b.mul(j, step_stride)
                each = [arithmetic.emit_input(b, b.add(start, offset)) for start in starts]
                pairs = zip(totals, product(each, many), strict=True)
                return [arithmetic.emit_sum(b, total, *factors) for total, factors in pairs]

            sums = emit_loop(b, I64(0), steps, 1, sums, step)
            for place, total in zip(chain(*places), sums, strict=True):
                b.store(total, place, align=4)

        emit_in_steps(b, rows, _BLOCKS[width], some_rows)

    emit_in_steps(b, vectors, _VECTORS, some_lanes)


def _emit_scores(
    b: Any,
    arithmetic: Arithmetic,
    keys: Any,
    key_bytes: Any,
    count: Any,
    queries: Any,
    vectors: Any,
    out: Any,
) -> None:
    """out[k] = the lanes' queries times key k; `key_bytes` are those of a key."""
    steps = b.sdiv(key_bytes, I64(4))
    _emit_product(b, arithmetic, keys, key_bytes, I64(4), count, queries, vectors, steps, out, None)


def _emit_values(
    b: Any,
    arithmetic: Arithmetic,
    values: Any,
    dim: Any,
    weights: Any,
    vectors: Any,
    steps: Any,
    out: Any,
    factors: Any,
) -> None:
    """out[d] = factors * out[d] + the sum of all weights times values in dimension d."""
    row = b.mul(dim, I64(4))
    _emit_product(b, arithmetic, values, I64(4), row, dim, weights, vectors, steps, out, factors)


def _emit_softmax(
    b: Any, arithmetic: Arithmetic, scores: Any, count: Any, first_key: Any, vectors: Any, state: Any
) -> None:
    """Scores of a chunk become weights, in their place; `state` goes on, and its factor says how."""

    def row(number: int, offset: Any) -> Any:
        return b.add(b.add(state, I64(number * ROW_BYTES)), offset)

    settings = row(SETTINGS, I64(0))
    scale, softcap = (load_float32(b, b.add(settings, I64(4 * i)), False) for i in range(2))
    is_capped = b.fcmp_ordered(">", softcap, F32(0.0))
    scales, caps = splat(b, b.select(is_capped, F32(1.0), scale)), splat(b, softcap)
    lowest = constant(FLOATS, LOWEST)

    def of_vector(v: Any, _: Any) -> None:
        offset = b.mul(v, I64(CACHE_LINE))

        def place(k: Any) -> Any:
            return pointer(b, _at(b, b.add(scores, offset), k, ROW_BYTES), FLOATS)

        def cap(k: Any, _: Any) -> None:
            ratio = b.fdiv(b.fmul(b.load(place(k), align=4), splat(b, scale)), caps)
            b.store(b.fmul(caps, _emit_tanh(b, ratio)), place(k), align=4)

        emit_loop(b, I64(0), b.select(is_capped, count, I64(0)), 1, [], cap)
        seen = [pointer(b, row(number, offset), WORDS) for number in (POSITION, START)]
        last, first = (b.load(each, align=4) for each in seen)

        def mask(k: Any, tops: list[Any]) -> list[Any]:
            key = splat(b, b.trunc(b.add(first_key, k), I32))
            is_seen = b.and_(b.icmp_signed("<=", key, last), b.icmp_signed(">=", key, first))
            score = b.select(is_seen, b.fmul(b.load(place(k), align=4), scales), lowest)
            b.store(score, place(k), align=4)
            return [b.select(b.fcmp_ordered(">", score, tops[0]), score, tops[0])]

        before = load_float32(b, row(TOP, offset), True)
        (top,) = emit_loop(b, I64(0), count, 1, [before], mask)
        factor = emit_exp(b, b.fsub(before, top))

        def weight(k: Any) -> Any:
            score = b.load(place(k), align=4)
            # "Unordered": what is no number shows in the answer.
            is_seen = b.fcmp_unordered(">", score, lowest)
            return b.select(is_seen, emit_exp(b, b.fsub(score, top)), constant(FLOATS, 0.0))

        def one(k: Any, totals: list[Any]) -> list[Any]:
            number = weight(k)
            b.store(number, place(k), align=4)
            return [b.fadd(totals[0], number)]

        def two(k: Any, totals: list[Any]) -> list[Any]:
            lower, upper = weight(k), weight(b.add(k, I64(1)))
            target = b.bitcast(place(b.ashr(k, I64(1))), WORDS.as_pointer())
            b.store(_emit_pair(b, lower, upper), target, align=4)
            return [b.fadd(b.fadd(totals[0], lower), upper)]

        total = b.fmul(load_float32(b, row(TOTAL, offset), True), factor)
        by, step = (1, one) if arithmetic is FLOAT32 else (2, two)
        (total,) = emit_loop(b, I64(0), count, by, [total], step)
        for number, value in ((TOP, top), (TOTAL, total), (FACTOR, factor)):
            b.store(value, pointer(b, row(number, offset), FLOATS), align=4)

    emit_loop(b, I64(0), vectors, 1, [], of_vector)


def _emit_tanh(b: Any, x: Any) -> Any:
    one, high, low = (constant(FLOATS, value) for value in (1.0, _FLAT, -_FLAT))
    x = b.select(b.fcmp_ordered("<", x, high), x, high)
    x = b.select(b.fcmp_ordered(">", x, low), x, low)
    power = emit_exp(b, b.fmul(x, constant(FLOATS, 2.0)))
    return b.fdiv(b.fsub(power, one), b.fadd(power, one))


def _emit_pair(b: Any, lower: Any, upper: Any, *, is_exact: bool = False) -> Any:
    """Both as bfloat16 in a word, rounded to nearest even; with `is_exact` they are such numbers already."""
    word = WORDS if lower.type == FLOATS else I32
    sixteen = constant(word, 16)
    low, high = (b.bitcast(number, word) for number in (lower, upper))
    if not is_exact:
        low, high = (
            b.add(b.add(bits, constant(word, 0x7FFF)), b.and_(b.lshr(bits, sixteen), constant(word, 1)))
            for bits in (low, high)
        )
    return b.or_(b.lshr(low, sixteen), b.and_(high, constant(word, -0x10000)))


def _emit_transposed(
    b: Any,
    arithmetic: Arithmetic,
    source: Any,
    source_bytes: Any,
    rows: Any,
    columns: Any,
    out: Any,
    out_bytes: Any,
) -> None:
    """out[j, i] = source[i, j], words, for 16 * `rows` i and 16 * `columns` j; the bytes are those of a row."""

    def block(i: Any, _: Any) -> None:
        def at(base: Any, row_bytes: Any, row: Any, column: Any, k: int) -> Any:
            start = b.mul(b.add(b.mul(row, I64(LANES)), I64(k)), row_bytes)
            return pointer(b, b.add(b.add(base, start), b.mul(column, I64(CACHE_LINE))), WORDS)

        def of_column(j: Any, _: Any) -> None:
            vectors = [b.load(at(source, source_bytes, i, j, k), align=4) for k in range(LANES)]
            for k, vector in enumerate(_emit_turned(b, vectors)):
                b.store(vector, at(out, out_bytes, j, i, k), align=4)

        emit_loop(b, I64(0), columns, 1, [], of_column)

    emit_loop(b, I64(0), rows, 1, [], block)


def _emit_turned(b: Any, vectors: list[Any]) -> list[Any]:
    """Sixteen rows as sixteen columns: halves are exchanged between rows 8 apart, quarters between rows 4 apart, ..."""
    distance = LANES
    while distance > 1:
        distance //= 2
        kept = [n for n in range(LANES) if not n & distance]
        order = range(LANES)
        lower = ir.Constant(WORDS, [n if not n & distance else LANES + n - distance for n in order])
        upper = ir.Constant(WORDS, [n + distance if not n & distance else LANES + n for n in order])
        for n in kept:
            one, other = vectors[n], vectors[n + distance]
            vectors[n], vectors[n + distance] = (
                b.shuffle_vector(one, other, lower),
                b.shuffle_vector(one, other, upper),
            )
    return vectors


multiply_keys = outlined("scores", _emit_scores, 6)
add_values = outlined("values", _emit_values, 7)
softmax = outlined("softmax", _emit_softmax, 5)
transpose = outlined("transposed", _emit_transposed, 6)


@intrinsic
def words_of(typing: Any, like: Any, stored: Any, arguments: Any) -> Any:
    """Numbers as the arithmetic of `like` takes them, `count` words at `out`: those at address `first`, or pairs of one
    there and one at `second`. `stored` is an array of their type.
    """
    in_pairs = like.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        b = builder
        first, second, out, count = unpack_tuple(b, values[2])
        load_number, item = loader_of(stored.dtype)

        def some(i: Any, width: int) -> None:
            offset, is_wide = b.mul(i, I64(item)), width == LANES
            words = load_number(b, b.add(first, offset), is_wide)
            if in_pairs:
                upper = load_number(b, b.add(second, offset), is_wide)
                words = _emit_pair(b, words, upper, is_exact=item == 2)
            b.store(words, pointer(b, _at(b, out, i, 4), words.type), align=4)

        emit_in_steps(b, count, LANES, some)
        return context.get_dummy_value()

    return types.void(like, stored, types.UniTuple(types.intp, 4)), generate


_ONE, _ZERO, _LOWEST = np.float32(1.0), np.float32(0.0), np.float32(LOWEST)


@compiled(inline="always")
def _round_up_to_vectors(count: Any) -> Any:
    return (count + LANES - 1) // LANES * LANES


@compiled(inline="always")
def _address(rows: Any, row: Any, head: Any) -> Any:
    """rows (rows, heads, D)"""
    return rows.ctypes.data + row * rows.strides[0] + head * rows.strides[1]


@compiled(inline="always")
def _find_keys(
    places: Any, count: Any, start: Any, table: Any, size: Any, pool: Any, key_row: Any, kv: Any
) -> None:
    """The addresses of `count` keys from position `start` on. Places too many, which all lanes mask, have the last."""
    block, slot = start // size, start % size
    for k in range(places.shape[0]):
        places[k] = _address(pool, table[block] + slot + key_row, kv)
        if k < count - 1:
            slot += 1
            if slot == size:
                block, slot = block + 1, 0


@compiled(inner=True)
def attend_tile(
    part: Any,
    tiles: Any,
    query: Any,
    pool: Any,
    key_row: Any,
    size: Any,
    tables: Any,
    scale: Any,
    softcap: Any,
    window: Any,
    out: Any,
) -> None:
    """One tile and one KV head: `part` counts the KV heads of the first tile, then those of the second.

    tiles (tiles, 5): its row of `tables`, the index of the row's first token in query and out (tokens, Hq, D), that
    token's position, and the tile's first query and their number, counted over the row's tokens and a KV head's query
    heads. pool (rows of the pool, H, D); tables (rows, blocks): where each block begins there, with its `size` keys
    `key_row` behind, and its values behind these. `window` 0: a query sees all positions before.
    """
    kv_heads, dim = pool.shape[1], pool.shape[2]
    group = query.shape[1] // kv_heads
    number, kv = part // kv_heads, part % kv_heads
    table, token, position = tables[tiles[number, 0]], tiles[number, 1], tiles[number, 2]
    first, count = tiles[number, 3], tiles[number, 4]
    per_word = 4 // query.itemsize
    words, vectors = dim // per_word, (count + LANES - 1) // LANES
    wide, wide_words = _round_up_to_vectors(dim), _round_up_to_vectors(words)
    # Scratch, in words behind the state: queries as they are and turned, keys, values, scores, sums.
    asked = STATE_ROWS * QUERIES
    turned = asked + QUERIES * wide
    keys = turned + QUERIES * wide
    values = keys + KEYS * wide
    scores = values + KEYS * wide
    summed = scores + KEYS * QUERIES
    room = np.empty(summed + QUERIES * wide + LANES, np.float32)
    aligned = -room.ctypes.data % CACHE_LINE // 4
    floats, base = room[aligned:], room.ctypes.data + 4 * aligned
    numbers = floats.view(np.int32)
    half = query.itemsize * words
    last = 0
    for i in range(vectors * LANES):
        # Lanes without a query of their own repeat the last one.
        index = first + min(i, count - 1)
        row = _address(query, token + index // group, kv * group + index % group)
        words_of(query, query, (row, row + half, base + 4 * (asked + i * wide_words), words))
        last = position + index // group
        numbers[POSITION * QUERIES + i] = last
        numbers[START * QUERIES + i] = last - window + 1 if window > 0 else 0
        floats[TOP * QUERIES + i], floats[TOTAL * QUERIES + i] = _LOWEST, _ZERO
    floats[SETTINGS * QUERIES], floats[SETTINGS * QUERIES + 1] = scale, softcap
    sums = floats[summed : summed + dim * QUERIES]
    for i in range(sums.shape[0]):
        sums[i] = _ZERO
    blocks = (base + 4 * asked, 4 * wide_words, vectors, wide_words // LANES, base + 4 * turned, ROW_BYTES)
    transpose(query, blocks)
    places = np.empty(KEYS, np.int64)
    start = max(0, numbers[START * QUERIES]) // KEYS * KEYS
    while start <= last:
        count_seen = min(KEYS, last + 1 - start)
        padded = (count_seen + KEY_STEP - 1) // KEY_STEP * KEY_STEP
        _find_keys(places[:padded], count_seen, start, table, size, pool, key_row, kv)
        half, to_value = pool.itemsize * words, size * pool.strides[0]
        for k in range(padded):
            words_of(query, pool, (places[k], places[k] + half, base + 4 * (keys + k * words), words))
        for j in range(padded // per_word):
            one, other = places[per_word * j] + to_value, places[per_word * j + per_word - 1] + to_value
            words_of(query, pool, (one, other, base + 4 * (values + j * dim), dim))
        multiply_keys(
            query, (base + 4 * keys, 4 * words, padded, base + 4 * turned, vectors, base + 4 * scores)
        )
        softmax(query, (base + 4 * scores, padded, start, vectors, base))
        steps, factors = padded // per_word, base + FACTOR * ROW_BYTES
        given = (base + 4 * values, dim, base + 4 * scores, vectors, steps, base + 4 * summed, factors)
        add_values(query, given)
        start += KEYS
    # Answers take the queries' place.
    transpose(query, (base + 4 * summed, ROW_BYTES, wide // LANES, vectors, base + 4 * asked, 4 * wide))
    for i in range(count):
        index, at = first + i, asked + i * wide
        row, answer = out[token + index // group, kv * group + index % group], floats[at : at + dim]
        factor = _ONE / floats[TOTAL * QUERIES + i]
        for d in range(dim):
            row[d] = pack(answer[d] * factor, row[d])


attend_tiles = in_parts(attend_tile)


def takes(pool: np.ndarray) -> bool:
    """Numbers of a head are multiplied in pairs, where they are bfloat16."""
    return bool(pool.shape[-1] % 2 == 0)


def compile_tile_ahead(query: np.ndarray, pool: np.ndarray) -> bool:
    """`attend_tile` takes the most of what a prefill compiles; query (tokens, Hq, D) and pool (rows of the pool, H, D)
    say the types. False: another process is at it.
    """
    number, tables = np.int64(0), np.zeros((1, 1), np.int64)
    scales = (np.float32(1.0), np.float32(0.0))
    return compile_unless_locked(
        attend_tile, number, tables, query, pool, number, number, tables, *scales, number, query
    )
