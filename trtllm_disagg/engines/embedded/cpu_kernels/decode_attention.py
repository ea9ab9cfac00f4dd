"""Attention of one query per row over the paged pool (numba, CPU). Rows are independent, as in layer_kernels.py.

The kernels are LLVM IR: for a row's heads and a run of positions they compute scores, and weighted sums of values. They
take a few positions at a time, with all heads, so they read a layer's part of a block from end to end. They prefetch
across the run's end into the next block, where processors do not. Every sum has a fixed order (llvm_ir.py), so two
halves of a run give the bits of one run. Addresses and strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compile_unless_locked, compiled
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.cpu_kernels.layer_kernels import load, pack
from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import (
    CACHE_LINE,
    F32,
    FLOATS,
    I64,
    LANES,
    emit_dots,
    emit_fma,
    emit_in_steps,
    emit_loop,
    emit_prefetch,
    exp,
    exponentials,
    load_float32,
    loader_of,
    noinline,
    pointer,
    splat,
)

#: By bytes of a number: positions, and query heads of a KV head, at a time. Their scores are made side by side,
#: their values added to sums that stay in registers; and so much is prefetched (docs/log/cpu-kernels.md).
_TILES = {4: (4, 1) if this_cpu().level == "avx2" else (2, 2), 2: (4, 1)}
#: Minimum bytes ahead.
_PREFETCH_DISTANCE = 10240
_ONE, _ZERO, _TWO = np.float32(1.0), np.float32(0.0), np.float32(2.0)
#: Beyond it tanh is one, in float32.
_FLAT = np.float32(10.0)


class _RunEmitter:
    """Emits the loops over positions, KV heads and their query heads.

    `per_position` (query heads, positions) float32 are the scores or weights, `per_head` (query heads, dim) float32 the
    query or the sums, `stored` the keys or values: slots of `kv_heads` heads.
    """

    def __init__(self, builder: Any, stored: Any, arguments: Any) -> None:
        self.b, (self.load, self.item) = builder, loader_of(stored)
        self._positions, self._heads = _TILES[self.item]
        self._per_head, self._per_head_stride, self._stored, self.slot_stride, self._head_stride = arguments[
            :5
        ]
        self._count, self._kv_heads, self._group, self.dim = arguments[5:9]
        self._per_position, self._per_position_stride, self._next_run = arguments[9:]
        b, stride = builder, self.slot_stride
        self._end = b.mul(self._count, stride)
        slots = b.sdiv(b.add(I64(_PREFETCH_DISTANCE - 1), stride), stride)
        far = b.icmp_signed("<", slots, self._count)
        self._prefetch_distance = b.select(far, b.mul(slots, stride), self._end)

    def emit(self, body: Body) -> None:
        """`body(run, per_head, stored, per_position)`: addresses, one for each query head of a tile, in `stored` for
        each of its positions.
        """
        b = self.b

        def positions(t: Any, n: int) -> None:
            def kv_head(kv: Any, _: Any) -> None:
                offset = b.mul(kv, self._head_stride)
                slots = [b.mul(b.add(t, I64(j)), self.slot_stride) for j in range(n)]
                for slot in slots:
                    self._emit_prefetch(slot, offset)
                stored = [b.add(b.add(self._stored, slot), offset) for slot in slots]

                def query_heads(g: Any, heads: int) -> None:
                    first = b.add(b.mul(kv, self._group), g)
                    numbers = [b.add(first, I64(i)) for i in range(heads)]
                    per_head = [b.add(self._per_head, b.mul(h, self._per_head_stride)) for h in numbers]
                    scores = b.add(self._per_position, b.mul(t, I64(4)))
                    per_position = [b.add(scores, b.mul(h, self._per_position_stride)) for h in numbers]
                    body(self, per_head, stored, per_position)

                emit_in_steps(b, self._group, self._heads, query_heads)

            emit_loop(b, I64(0), self._kv_heads, 1, [], kv_head)

        emit_in_steps(b, self._count, self._positions, positions)

    def _emit_prefetch(self, slot: Any, offset: Any) -> None:
        """A head's part of a slot further on in this run, or in the next, `_next_run` bytes behind the end."""
        b = self.b
        soon = b.add(slot, self._prefetch_distance)
        gap = b.select(b.icmp_signed(">=", soon, self._end), self._next_run, I64(0))
        address = b.add(b.add(self._stored, offset), b.add(soon, gap))
        emit_loop(
            b, I64(0), self._head_stride, CACHE_LINE, [], lambda i, _: emit_prefetch(b, b.add(address, i), 2)
        )


Body = Callable[[_RunEmitter, list[Any], list[Any], list[Any]], None]


def _emit_scores(run: _RunEmitter, queries: list[Any], keys: list[Any], scores: list[Any]) -> None:
    b = run.b
    dots = iter(emit_dots(b, queries, keys, run.dim, run.load, run.item))
    for row in scores:
        for j in range(len(keys)):
            b.store(next(dots), pointer(b, b.add(row, I64(4 * j)), F32), align=4)


def _emit_weighted(run: _RunEmitter, sums: list[Any], values: list[Any], weights: list[Any]) -> None:
    """Sixteen dimensions at a time, then what is left one by one."""
    b = run.b
    numbers = [
        [load_float32(b, b.add(row, I64(4 * j)), False) for j in range(len(values))] for row in weights
    ]
    factors = {LANES: [[splat(b, number) for number in row] for row in numbers], 1: numbers}

    def add(d: Any, width: int) -> None:
        at, offset = b.mul(d, I64(4)), b.mul(d, I64(run.item))
        places = [pointer(b, b.add(row, at), FLOATS if width == LANES else F32) for row in sums]
        totals = [b.load(place, align=4) for place in places]
        for j, value in enumerate(values):
            number = run.load(b, b.add(value, offset), width == LANES)
            of_heads = zip(factors[width], totals, strict=True)
            totals = [emit_fma(b, row[j], number, total) for row, total in of_heads]
        for total, place in zip(totals, places, strict=True):
            b.store(total, place, align=4)

    emit_in_steps(b, run.dim, LANES, add)


def _over_run(body: Body) -> Any:
    @intrinsic
    def over_run(typing: Any, pool: Any, addresses: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _RunEmitter(builder, pool.dtype, unpack_tuple(builder, arguments[1])).emit(body)
            return context.get_dummy_value()

        return types.void(pool, types.UniTuple(types.intp, 12)), generate

    @compiled(inline="always")
    def heads_over_run(
        per_head: Any,
        pool: Any,
        row: Any,
        first: Any,
        last: Any,
        count: Any,
        per_position: Any,
        at: Any,
        next_row: Any,
    ) -> None:
        """`count` rows of the pool from `row` on and the KV heads `first` to `last`; `next_row` is read after these.
        per_head (Hq, D) float32, pool (rows, H, D), per_position (Hq, positions) float32, of which the first is `at`.
        """
        group = per_head.shape[0] // pool.shape[1]
        addresses = (
            per_head.ctypes.data + first * group * per_head.strides[0],
            per_head.strides[0],
            pool.ctypes.data + row * pool.strides[0] + first * pool.strides[1],
            pool.strides[0],
            pool.strides[1],
            count,
            last - first,
            group,
            per_head.shape[1],
            per_position.ctypes.data + first * group * per_position.strides[0] + 4 * at,
            per_position.strides[0],
            (next_row - row - count) * pool.strides[0],
        )
        over_run(pool, addresses)

    return heads_over_run


#: scores[h, at + t] = query[h] . pool[row + t, h's KV head]; called with (query, pool, ..., scores, ...).
scores_of = _over_run(_emit_scores)
#: sums[h] += the sum over t of weights[h, at + t] * pool[row + t, h's KV head]; (sums, pool, ..., weights, ...).
add_weighted = _over_run(_emit_weighted)


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
        i, count = position - start, _run_length(position, context, size)
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
        i, count = position - start, _run_length(position, context, size)
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
    return compile_unless_locked(attend_heads, row, *place, scratch, scratch, scratch, row)


def compile_rows_ahead(query: np.ndarray, pool: np.ndarray) -> bool:
    """The same for `attend_rows`."""
    number, each, tables = np.int64(0), np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    scores = np.zeros((1, 1), np.float32)
    return compile_unless_locked(
        attend_rows, query, pool, number, number, tables, each, each, _ZERO, _ZERO, scores, query
    )


@compiled(inline="always")
def _place(table: Any, position: Any, size: Any) -> Any:
    """The row of this position's key in the first layer."""
    return table[position // size] + position % size


@compiled(inline="always")
def _run_length(position: Any, context: Any, size: Any) -> Any:
    """Positions from this one to the end of its block or of the context."""
    return min(size - position % size, context - position)
