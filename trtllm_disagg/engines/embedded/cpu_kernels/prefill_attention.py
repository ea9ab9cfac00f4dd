"""Causal attention of prompt tokens over the paged pool, by tiles of queries (numba and LLVM IR, CPU).

A tile is up to 64 queries of one KV head: of each token as many as share the head. They lie side by side in the
lanes of vectors, and every key and value of the pool is multiplied with all of them; a query's maximum, its sum and
its masked keys are arithmetic of its own lane. Keys come in chunks, and sums go on from chunk to chunk as in
FlashAttention (Dao et al., 2022): what was summed up is scaled when a larger score comes.

A chunk begins at a multiple of its length, and no lane knows of another one. So a query's bits depend on nothing but
its position: not on where its prompt was cut, nor on which other queries are in its tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compile_unless_taken, compiled
from trtllm_disagg.engines.embedded.cpu_kernels.layer_kernels import pack
from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import CACHE_LINE, LANES, LOWEST
from trtllm_disagg.engines.embedded.cpu_kernels.parallel import in_parts
from trtllm_disagg.engines.embedded.cpu_kernels.prefill_tile import (
    FACTOR,
    KEY_STEP,
    KEYS,
    POSITION,
    QUERIES,
    ROW_BYTES,
    SETTINGS,
    START,
    STATE_ROWS,
    TOP,
    TOTAL,
    add_values,
    multiply_keys,
    softmax,
    transpose,
    words_of,
)

_ONE, _ZERO, _LOWEST = np.float32(1.0), np.float32(0.0), np.float32(LOWEST)


@compiled(inline="always")
def _whole_vectors(count: Any) -> Any:
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
    wide, wide_words = _whole_vectors(dim), _whole_vectors(words)
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
    return compile_unless_taken(
        attend_tile, number, tables, query, pool, number, number, tables, *scales, number, query
    )
