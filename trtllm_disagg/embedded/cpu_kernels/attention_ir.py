"""A row's heads over a run of positions: their scores, and the weighted sums of the values.

Position by position, all heads of each: a part of a block is read from one end to the other, and what is two pages
ahead is fetched, where processors stop by themselves, in the next block if need be. The order of every sum is fixed
(lanes.py), and a run that is cut in two gives the same bits as the whole. Addresses and strides are in bytes.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic, overload

from trtllm_disagg.embedded.cpu_kernels.llvm_ir import (
    F32,
    FLOATS,
    I64,
    LANES,
    Load,
    declare_fma,
    emit_dot,
    emit_loop,
    emit_prefetch,
    load_bfloat16,
    load_float32,
    splat,
)

#: Positions whose values are added to a sum while it is in a register.
_POSITIONS = 4
#: Bytes. Measured: docs/log.md.
_AHEAD = 8192
_NOTHING = I64(0)


class _Ahead:
    """Emits the fetching of what a run's reader comes to soon: later in the run, or in the next one, which begins
    `leap` bytes behind this one's end.
    """

    def __init__(self, builder: Any, run: Any, stride: Any, count: Any, leap: Any, length: Any) -> None:
        self._b, self._run, self._stride, self._leap, self._length = builder, run, stride, leap, length
        self._end = builder.mul(count, stride)
        far = builder.icmp_signed(">", self._end, I64(_AHEAD))
        self._distance = builder.select(far, I64(_AHEAD), self._end)

    def emit(self, position: Any) -> None:
        b = self._b
        soon = b.add(b.mul(position, self._stride), self._distance)
        leap = b.select(b.icmp_signed(">=", soon, self._end), self._leap, I64(0))
        emit_prefetch(b, b.add(self._run, b.add(soon, leap)), self._length)


def _scores(load: Load, item: int) -> Any:
    @intrinsic
    def scores(
        typing: Any,
        query: Any,
        query_stride: Any,
        keys: Any,
        slot_stride: Any,
        head_stride: Any,
        count: Any,
        kv_heads: Any,
        group: Any,
        dim: Any,
        out: Any,
        out_stride: Any,
        leap: Any,
    ) -> Any:
        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            query, query_stride, keys, slot_stride, head_stride = arguments[:5]
            count, kv_heads, group, dim, out, out_stride, leap = arguments[5:]
            ahead = _Ahead(b, keys, slot_stride, count, leap, b.mul(kv_heads, head_stride))

            def position(t: Any, nothing: Any) -> Any:
                ahead.emit(t)

                def key_head(kv: Any, nothing: Any) -> Any:
                    key = b.add(b.add(keys, b.mul(t, slot_stride)), b.mul(kv, head_stride))

                    def query_head(g: Any, nothing: Any) -> Any:
                        head = b.add(b.mul(kv, group), g)
                        asked = b.add(query, b.mul(head, query_stride))
                        place = b.add(b.add(out, b.mul(head, out_stride)), b.mul(t, I64(4)))
                        score = emit_dot(b, asked, key, dim, load, item)
                        b.store(score, b.inttoptr(place, F32.as_pointer()), align=4)
                        return nothing

                    return emit_loop(b, I64(0), group, I64(1), nothing, query_head)

                return emit_loop(b, I64(0), kv_heads, I64(1), nothing, key_head)

            emit_loop(b, I64(0), count, I64(1), _NOTHING, position)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 12), generate

    return scores


class _Weigh:
    """Emits sums[head] += weights[head][t] * values[t][head's KV head] for a run of positions."""

    def __init__(self, builder: Any, load: Load, item: int, arguments: Any) -> None:
        self._b, self._load, self._item = builder, load, item
        self._weights, self._weight_stride, self._values, self._slot_stride, self._head_stride = arguments[:5]
        self._count, self._kv_heads, self._group, self._dim, self._sums, self._sum_stride = arguments[5:11]
        length = builder.mul(self._kv_heads, self._head_stride)
        self._ahead = _Ahead(builder, self._values, self._slot_stride, self._count, arguments[11], length)

    def emit(self) -> None:
        b = self._b
        whole = b.and_(self._count, I64(-_POSITIONS))
        emit_loop(b, I64(0), whole, I64(_POSITIONS), _NOTHING, lambda t, n: self._heads(t, _POSITIONS, n))
        emit_loop(b, whole, self._count, I64(1), _NOTHING, lambda t, n: self._heads(t, 1, n))

    def _heads(self, t: Any, positions: int, nothing: Any) -> Any:
        b = self._b
        for j in range(positions):
            self._ahead.emit(b.add(t, I64(j)))

        def key_head(kv: Any, nothing: Any) -> Any:
            value = b.add(b.add(self._values, b.mul(t, self._slot_stride)), b.mul(kv, self._head_stride))

            def query_head(g: Any, nothing: Any) -> Any:
                head = b.add(b.mul(kv, self._group), g)
                weight = b.add(b.add(self._weights, b.mul(head, self._weight_stride)), b.mul(t, I64(4)))
                sums = b.add(self._sums, b.mul(head, self._sum_stride))
                self._dimensions(value, weight, sums, positions)
                return nothing

            return emit_loop(b, I64(0), self._group, I64(1), nothing, query_head)

        return emit_loop(b, I64(0), self._kv_heads, I64(1), nothing, key_head)

    def _dimensions(self, value: Any, weight: Any, sums: Any, positions: int) -> None:
        """Sixteen at a time, then what is left one by one."""
        b = self._b
        numbers = [load_float32(b, b.add(weight, I64(4 * j)), False) for j in range(positions)]
        factors = [splat(b, number) for number in numbers]
        whole = b.and_(self._dim, I64(-LANES))

        def add(d: Any, kind: Any, by: Any) -> None:
            wide = kind == FLOATS
            place = b.inttoptr(b.add(sums, b.mul(d, I64(4))), kind.as_pointer())
            total = b.load(place, align=4)
            for j in range(positions):
                at = b.add(b.add(value, b.mul(self._slot_stride, I64(j))), b.mul(d, I64(self._item)))
                total = b.call(declare_fma(b, kind), [by[j], self._load(b, at, wide), total])
            b.store(total, place, align=4)

        def lanes(d: Any, nothing: Any) -> Any:
            add(d, FLOATS, factors)
            return nothing

        def single(d: Any, nothing: Any) -> Any:
            add(d, F32, numbers)
            return nothing

        emit_loop(b, I64(0), whole, I64(LANES), _NOTHING, lanes)
        emit_loop(b, whole, self._dim, I64(1), _NOTHING, single)


def _weigh(load: Load, item: int) -> Any:
    @intrinsic
    def weigh(
        typing: Any,
        weights: Any,
        weight_stride: Any,
        values: Any,
        slot_stride: Any,
        head_stride: Any,
        count: Any,
        kv_heads: Any,
        group: Any,
        dim: Any,
        sums: Any,
        sum_stride: Any,
        leap: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Weigh(builder, load, item, arguments).emit()
            return context.get_dummy_value()

        return types.void(*[types.intp] * 12), generate

    return weigh


_scores_float32, _scores_bfloat16 = _scores(load_float32, 4), _scores(load_bfloat16, 2)
_weigh_float32, _weigh_bfloat16 = _weigh(load_float32, 4), _weigh(load_bfloat16, 2)


def scores_of(
    query: Any, pool: Any, row: Any, first: Any, last: Any, count: Any, out: Any, at: Any, then: Any
) -> None:
    """out[h, at + t] = query[h] . pool[row + t, h's KV head], for t below `count` and the query heads of the KV heads
    `first` to `last`. query (Hq, D) float32, pool (rows, H, D), out (Hq, positions) float32. The row that is read
    after these: `then`.
    """


@overload(scores_of, inline="always")
def _scores_overload(
    query: Any, pool: Any, row: Any, first: Any, last: Any, count: Any, out: Any, at: Any, then: Any
) -> Any:
    inner = _scores_bfloat16 if pool.dtype == types.uint16 else _scores_float32

    def scores(
        query: Any, pool: Any, row: Any, first: Any, last: Any, count: Any, out: Any, at: Any, then: Any
    ) -> None:
        group = query.shape[0] // pool.shape[1]
        inner(
            query.ctypes.data + first * group * query.strides[0],
            query.strides[0],
            pool.ctypes.data + row * pool.strides[0] + first * pool.strides[1],
            pool.strides[0],
            pool.strides[1],
            count,
            last - first,
            group,
            query.shape[1],
            out.ctypes.data + first * group * out.strides[0] + 4 * at,
            out.strides[0],
            (then - row - count) * pool.strides[0],
        )

    return scores


def add_weighted(
    weights: Any, at: Any, pool: Any, row: Any, first: Any, last: Any, count: Any, sums: Any, then: Any
) -> None:
    """sums[h] += the sum over t below `count` of weights[h, at + t] * pool[row + t, h's KV head], for the query heads
    of the KV heads `first` to `last`. weights (Hq, positions), sums (Hq, D) float32, pool (rows, H, D). The row that is
    read after these: `then`.
    """


@overload(add_weighted, inline="always")
def _weighted_overload(
    weights: Any, at: Any, pool: Any, row: Any, first: Any, last: Any, count: Any, sums: Any, then: Any
) -> Any:
    inner = _weigh_bfloat16 if pool.dtype == types.uint16 else _weigh_float32

    def weigh(
        weights: Any, at: Any, pool: Any, row: Any, first: Any, last: Any, count: Any, sums: Any, then: Any
    ) -> None:
        group = sums.shape[0] // pool.shape[1]
        inner(
            weights.ctypes.data + first * group * weights.strides[0] + 4 * at,
            weights.strides[0],
            pool.ctypes.data + row * pool.strides[0] + first * pool.strides[1],
            pool.strides[0],
            pool.strides[1],
            count,
            last - first,
            group,
            sums.shape[1],
            sums.ctypes.data + first * group * sums.strides[0],
            sums.strides[0],
            (then - row - count) * pool.strides[0],
        )

    return weigh
