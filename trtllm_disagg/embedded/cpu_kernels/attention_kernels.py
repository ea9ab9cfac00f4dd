"""Attention of one query over the paged pool, each row by itself (numba, CPU); as in layer_kernels.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_disagg.embedded.cpu_kernels.attention_ir import add_weighted, scores_of
from trtllm_disagg.embedded.cpu_kernels.compiled import compile_unless_taken, compiled
from trtllm_disagg.embedded.cpu_kernels.layer_kernels import load, pack
from trtllm_disagg.embedded.cpu_kernels.llvm_ir import exp, exponentials, noinline

_ONE, _ZERO, _TWO = np.float32(1.0), np.float32(0.0), np.float32(2.0)
#: Beyond it tanh is one, in float32.
_FLAT = np.float32(10.0)


@compiled(inline="always")
def _tanh(x: Any) -> Any:
    e = exp(_TWO * min(max(x, -_FLAT), _FLAT))
    return (e - _ONE) / (e + _ONE)


@compiled()
def attend_rows(
    q: Any,
    pool: Any,
    key_row: Any,
    size: Any,
    tables: Any,
    contexts: Any,
    starts: Any,
    scale: Any,
    softcap: Any,
    scores: Any,
    out: Any,
) -> None:
    """One query a row: q and out (rows, Hq, D), pool (rows of the pool, H, D), tables (rows, blocks): where each block
    begins in the pool. There a layer's keys are `key_row` on, `size` of them, and its values follow.

    Row r sees positions starts[r] to contexts[r]. A softcap above zero bounds the scores. `scores` is scratch
    (Hq, longest context), float32.
    """
    rows, num_heads, dim = q.shape
    query = np.empty((num_heads, dim), np.float32)
    summed = np.empty((num_heads, dim), np.float32)
    for r in range(rows):
        attend_heads(
            q[r],
            # Of the type that decode_step.py gives: a literal 0 would be compiled once more.
            np.int64(0),
            pool.shape[1],
            pool,
            key_row,
            size,
            tables[r],
            starts[r],
            contexts[r],
            scale,
            softcap,
            scores,
            query,
            summed,
            out[r],
        )


@compiled(inner=True)
def attend_heads(
    q: Any,
    first_head: Any,
    last_head: Any,
    pool: Any,
    key_row: Any,
    size: Any,
    table: Any,
    start: Any,
    context: Any,
    scale: Any,
    softcap: Any,
    scores: Any,
    query: Any,
    summed: Any,
    out: Any,
) -> None:
    """One row, some KV heads and their query heads: q and out (Hq, D); scores (Hq, longest context), query and
    summed (Hq, D) are scratch.
    """
    noinline()
    num_heads, dim = query.shape
    group = num_heads // pool.shape[1]
    lower, upper = first_head * group, last_head * group
    factors = np.empty(num_heads, np.float32)
    for h in range(lower, upper):
        row, asked, sums = q[h], query[h], summed[h]
        for d in range(dim):
            asked[d] = load(row[d]) * scale
            sums[d] = _ZERO
    first_key = _place(table, start, size) + key_row
    first_value = first_key + size
    position, at = start, first_key
    while position < context:
        i, count = position - start, _run(position, context, size)
        position += count
        next_row = _place(table, position, size) + key_row if position < context else first_value
        scores_of(query, pool, at, first_head, last_head, count, scores, i, next_row)
        at = next_row
    for h in range(lower, upper):
        if softcap > _ZERO:
            capped = scores[h]
            for t in range(context - start):
                capped[t] = softcap * _tanh(capped[t] / softcap)
        factors[h] = _ONE / exponentials(scores[h], context - start)
    position, at = start, first_value
    while position < context:
        i, count = position - start, _run(position, context, size)
        position += count
        next_row = _place(table, position, size) + key_row + size if position < context else at + count
        add_weighted(summed, pool, at, first_head, last_head, count, scores, i, next_row)
        at = next_row
    for h in range(lower, upper):
        factor, sums, target = factors[h], summed[h], out[h]
        for d in range(dim):
            target[d] = pack(sums[d] * factor, target[d])


def compile_heads_ahead(query: np.ndarray, pool: np.ndarray) -> bool:
    """`attend_heads` takes a third of all compilation and calls no other kernel: of two engines that start together,
    one begins with it. query (rows, Hq, D) and pool (rows of the pool, H, D) say the types. False: another process is
    at it.
    """
    number, table, scratch = np.int64(0), np.zeros(1, np.int64), np.zeros((1, 1), np.float32)
    row = query[0]
    place = (number, number, pool, number, number, table, number, number, _ZERO, _ZERO)
    return compile_unless_taken(attend_heads, row, *place, scratch, scratch, scratch, row)


def compile_rows_ahead(query: np.ndarray, pool: np.ndarray) -> bool:
    """The same for `attend_rows`."""
    number, each, tables = np.int64(0), np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    scores = np.zeros((1, 1), np.float32)
    return compile_unless_taken(
        attend_rows, query, pool, number, number, tables, each, each, _ZERO, _ZERO, scores, query
    )


@compiled(inline="always")
def _place(table: Any, position: Any, size: Any) -> Any:
    """The row of this position's key in the first layer."""
    return table[position // size] + position % size


@compiled(inline="always")
def _run(position: Any, context: Any, size: Any) -> Any:
    """Positions from this one to the end of its block or of the context."""
    return min(size - position % size, context - position)
