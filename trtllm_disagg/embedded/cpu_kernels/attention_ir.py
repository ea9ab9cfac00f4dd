"""A row's heads over a run of positions: their scores, and the weighted sums of the values.

A few positions at a time, all heads of each: a layer's part of a block is read from one end to the other, and what
is read soon is prefetched, beyond the run's end in the next block, where processors stop by themselves. The order of
every sum is fixed (llvm_ir.py), and a run that is cut in two gives the same bits as the whole. Addresses and strides
are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from trtllm_disagg.embedded.cpu_kernels.compiled import compiled
from trtllm_disagg.embedded.cpu_kernels.llvm_ir import (
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
    load_float32,
    loader_of,
    pointer,
    splat,
)

#: Positions with scores made side by side, and with values added to a sum while it is in a register.
_POSITIONS = 4
#: At least so many bytes ahead. Measured: docs/log.md.
_PREFETCH_DISTANCE = 6144


class _Run:
    """Emits the loops over positions, KV heads and their query heads.

    `per_position` (query heads, positions) float32 are the scores or weights, `per_head` (query heads, dim) float32 the
    query or the sums, `stored` the keys or values: slots of `kv_heads` heads.
    """

    def __init__(self, builder: Any, stored: Any, arguments: Any) -> None:
        self.b, (self.load, self.item) = builder, loader_of(stored)
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

    def emit(self, body: Callable[[_Run, Any, list[Any], Any], None]) -> None:
        """`body(run, per_head, stored, per_position)`: addresses of a head; `stored` has one for each position."""
        b = self.b

        def positions(t: Any, n: int) -> None:
            def kv_head(kv: Any, _: Any) -> None:
                offset = b.mul(kv, self._head_stride)
                slots = [b.mul(b.add(t, I64(j)), self.slot_stride) for j in range(n)]
                for slot in slots:
                    self._emit_prefetch(slot, offset)
                stored = [b.add(b.add(self._stored, slot), offset) for slot in slots]

                def query_head(g: Any, _: Any) -> None:
                    head = b.add(b.mul(kv, self._group), g)
                    per_head = b.add(self._per_head, b.mul(head, self._per_head_stride))
                    per_position = b.add(self._per_position, b.mul(head, self._per_position_stride))
                    body(self, per_head, stored, b.add(per_position, b.mul(t, I64(4))))

                emit_loop(b, I64(0), self._group, 1, [], query_head)

            emit_loop(b, I64(0), self._kv_heads, 1, [], kv_head)

        emit_in_steps(b, self._count, _POSITIONS, positions)

    def _emit_prefetch(self, slot: Any, offset: Any) -> None:
        """A head's part of a slot further on in this run, or in the next, `_next_run` bytes behind the end."""
        b = self.b
        soon = b.add(slot, self._prefetch_distance)
        gap = b.select(b.icmp_signed(">=", soon, self._end), self._next_run, I64(0))
        address = b.add(b.add(self._stored, offset), b.add(soon, gap))
        emit_loop(
            b, I64(0), self._head_stride, CACHE_LINE, [], lambda i, _: emit_prefetch(b, b.add(address, i))
        )


def _emit_scores(run: _Run, query: Any, keys: list[Any], scores: Any) -> None:
    b = run.b
    for j, score in enumerate(emit_dots(b, query, keys, run.dim, run.load, run.item)):
        b.store(score, pointer(b, b.add(scores, I64(4 * j)), F32), align=4)


def _emit_weighted(run: _Run, sums: Any, values: list[Any], weights: Any) -> None:
    """Sixteen dimensions at a time, then what is left one by one."""
    b = run.b
    numbers = [load_float32(b, b.add(weights, I64(4 * j)), False) for j in range(len(values))]
    factors = {LANES: [splat(b, number) for number in numbers], 1: numbers}

    def add(d: Any, width: int) -> None:
        place = pointer(b, b.add(sums, b.mul(d, I64(4))), FLOATS if width == LANES else F32)
        total, offset = b.load(place, align=4), b.mul(d, I64(run.item))
        for factor, value in zip(factors[width], values, strict=True):
            total = emit_fma(b, factor, run.load(b, b.add(value, offset), width == LANES), total)
        b.store(total, place, align=4)

    emit_in_steps(b, run.dim, LANES, add)


def _over_run(body: Callable[[_Run, Any, list[Any], Any], None]) -> Any:
    @intrinsic
    def over_run(typing: Any, pool: Any, addresses: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Run(builder, pool.dtype, unpack_tuple(builder, arguments[1])).emit(body)
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
