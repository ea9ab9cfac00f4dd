"""Products of a few rows with a packed weight, at the speed at which memory delivers the weight.

The weight is oneDNN's own packed copy (linear.py): panels of 64 outputs, in a panel one line of 64 weights for
each input (float32), or for each pair of inputs (bfloat16). The inner loop is generated as vector code: `rows` x 64
sums stay in registers while the panel streams by. Sums run over the inputs in order, in blocks of `block` inputs
whose totals are added up: that is what oneDNN does, so the bits are the same whichever of the two runs. With fewer or
narrower registers a panel is read in parts, one behind the other: the same sums.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from trtllm_disagg.embedded.compiled import compiled
from trtllm_disagg.embedded.cpu import this_cpu

PANEL = 64
#: More rows than this in one pass do not fit the registers.
_MOST = 6
_LANES = 16
_VECTORS = PANEL // _LANES
_LINE = 64

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)
_BYTE_POINTER = ir.IntType(8).as_pointer()


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no stubs, and no such type
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * _LANES)


def _declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * _LANES))


class _Float32:
    """One input: sum = input * weight + sum, fused."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._fma = _declare(builder, "llvm.fma.v16f32", _FLOATS, [_FLOATS] * 3)

    def input(self, address: Any) -> Any:
        return _splat(self._builder, self._builder.load(_at(self._builder, address, _F32)), _FLOATS)

    def weights(self, address: Any) -> Any:
        return self._builder.load(_at(self._builder, address, _FLOATS), align=4)

    def accumulate(self, total: Any, given: Any, weights: Any) -> Any:
        return self._builder.call(self._fma, [given, weights, total])


class _BFloat16:
    """A pair of inputs: sum = sum + input0 * weight0 + input1 * weight1, as the processor's instruction has it."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        self._dot = _declare(builder, name, _FLOATS, [_FLOATS, _PAIRS, _PAIRS])

    def input(self, address: Any) -> Any:
        pair = self._builder.load(_at(self._builder, address, _I32), align=2)
        return self._builder.bitcast(_splat(self._builder, pair, _WORDS), _PAIRS)

    def weights(self, address: Any) -> Any:
        words = self._builder.load(_at(self._builder, address, _WORDS), align=4)
        return self._builder.bitcast(words, _PAIRS)

    def accumulate(self, total: Any, given: Any, weights: Any) -> Any:
        return self._builder.call(self._dot, [total, weights, given])


def _pass(rows: int, arithmetic: type[_Float32 | _BFloat16]) -> Any:
    """`rows` rows through one block of one panel, as a function that numba-compiled code can call:

    (x, row stride of x, weights, steps, out, row stride of out, add?, prefetched address, bytes a prefetch), addresses
    and strides in bytes. A step is four bytes of x. `add?` 0: out is written, else added to.
    """

    @intrinsic
    def product(
        typing: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        steps: Any,
        out: Any,
        out_stride: Any,
        add: Any,
        ahead: Any,
        by: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vectors = _vectors_at_once(rows)
            *given, ahead, by = arguments
            for first in range(0, _VECTORS, vectors):
                part = range(first, first + vectors)
                passed = builder.mul(builder.mul(given[3], by), _I64(first))
                _emit_pass(
                    builder,
                    rows,
                    part,
                    arithmetic(builder),
                    _PREFETCHES[rows],
                    *given,
                    builder.add(ahead, passed),
                    by,
                )
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), generate

    return product


def _vectors_at_once(rows: int) -> int:
    """How many of a panel's vectors are summed up at a time: as many sums as fit the registers beside every row's input
    and two weights.
    """
    registers, floats = this_cpu().vector_registers
    each = -(-_LANES // floats)
    fitting = (n for n in (_VECTORS, _VECTORS // 2) if rows * n * each + rows + 2 <= registers)
    return next(fitting, 1)


def _emit_pass(
    b: Any,
    rows: int,
    vectors: range,
    arithmetic: _Float32 | _BFloat16,
    prefetch: bool,
    x: Any,
    x_stride: Any,
    w: Any,
    steps: Any,
    out: Any,
    out_stride: Any,
    add: Any,
    ahead: Any,
    by: Any,
) -> None:
    starts = [b.add(x, b.mul(x_stride, _I64(r))) for r in range(rows)]
    before, loop, after = b.block, b.append_basic_block("steps"), b.append_basic_block("sums")
    b.branch(loop)
    b.position_at_end(loop)
    step, line, offset, soon = b.phi(_I64), b.phi(_I64), b.phi(_I64), b.phi(_I64)
    totals = [[b.phi(_FLOATS) for _ in vectors] for _ in range(rows)]
    if prefetch:
        fetch = _declare(b, "llvm.prefetch.p0", ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])
        for i in range(len(vectors)):
            there = b.add(soon, b.mul(by, _I64(i)))
            b.call(fetch, [b.inttoptr(there, _BYTE_POINTER), _I32(0), _I32(2), _I32(1)])
    inputs = [arithmetic.input(b.add(start, offset)) for start in starts]
    sums: list[list[Any]] = [[] for _ in range(rows)]
    for i, v in enumerate(vectors):
        weights = arithmetic.weights(b.add(line, _I64(_LINE * v)))
        for r in range(rows):
            sums[r].append(arithmetic.accumulate(totals[r][i], inputs[r], weights))
    advances = [(step, _I64(0), _I64(1)), (line, w, _I64(_LINE * _VECTORS)), (offset, _I64(0), _I64(4))]
    advances.append((soon, ahead, b.mul(by, _I64(len(vectors)))))
    for counter, start, by in advances:
        counter.add_incoming(start, before)
        counter.add_incoming(b.add(counter, by), loop)
    zero = ir.Constant(_FLOATS, [0.0] * _LANES)
    for r in range(rows):
        for i in range(len(vectors)):
            totals[r][i].add_incoming(zero, before)
            totals[r][i].add_incoming(sums[r][i], loop)
    b.cbranch(b.icmp_signed("<", b.add(step, _I64(1)), steps), loop, after)
    b.position_at_end(after)
    adds = b.icmp_signed("!=", add, _I64(0))
    for r in range(rows):
        for i, v in enumerate(vectors):
            place = _at(b, b.add(b.add(out, b.mul(out_stride, _I64(r))), _I64(_LINE * v)), _FLOATS)
            more = b.fadd(b.load(place, align=4), sums[r][i])
            b.store(b.select(adds, more, sums[r][i]), place, align=4)


#: By number of rows: does a pass prefetch the next block?
_PREFETCHES = (False, *(rows == _MOST or _vectors_at_once(rows) < _VECTORS for rows in range(1, _MOST + 1)))

_f1, _f2, _f3, _f4, _f5, _f6 = (_pass(rows, _Float32) for rows in range(1, _MOST + 1))
_b1, _b2, _b3, _b4, _b5, _b6 = (_pass(rows, _BFloat16) for rows in range(1, _MOST + 1))


@compiled()
def multiply_float32(x: Any, weight: Any, block: Any, out: Any, first: Any, last: Any) -> None:
    """out (rows, at least 64 * last) float32 = x (rows, inputs) float32 by panels `first` to `last` of the weight
    at address `weight`. x and out have their rows' elements side by side.
    """
    rows, inputs = x.shape
    x_stride, out_stride = x.strides[0], out.strides[0]
    groups = (rows + _MOST - 1) // _MOST
    odd = rows - _MOST * (groups - 1)
    prefetching = groups if _PREFETCHES[odd] else max(groups - 1, 1)
    by = (_LINE + prefetching - 1) // prefetching
    for panel in range(first, last):
        for start in range(0, inputs, block):
            steps = min(block, inputs - start)
            w = weight + (panel * inputs + start) * (4 * PANEL)
            a = x.ctypes.data + 4 * start
            o = out.ctypes.data + 4 * PANEL * panel
            part = steps * _VECTORS * by
            ahead = w + steps * 4 * PANEL
            if odd == 1:
                _f1(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            elif odd == 2:
                _f2(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            elif odd == 3:
                _f3(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            elif odd == 4:
                _f4(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            elif odd == 5:
                _f5(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            else:
                _f6(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            if _PREFETCHES[odd]:
                ahead += part
            for row in range(odd, rows, _MOST):
                _f6(
                    a + row * x_stride, x_stride, w, steps, o + row * out_stride, out_stride, start, ahead, by
                )
                ahead += part


@compiled()
def multiply_bfloat16(x: Any, weight: Any, block: Any, out: Any, first: Any, last: Any) -> None:
    """The same for bfloat16 x (as uint16) and weight; out is float32. `block` is even."""
    rows, inputs = x.shape
    x_stride, out_stride = x.strides[0], out.strides[0]
    groups = (rows + _MOST - 1) // _MOST
    odd = rows - _MOST * (groups - 1)
    prefetching = groups if _PREFETCHES[odd] else max(groups - 1, 1)
    by = (_LINE + prefetching - 1) // prefetching
    for panel in range(first, last):
        for start in range(0, inputs, block):
            steps = min(block, inputs - start) // 2
            w = weight + (panel * inputs + start) * (2 * PANEL)
            a = x.ctypes.data + 2 * start
            o = out.ctypes.data + 4 * PANEL * panel
            part = steps * _VECTORS * by
            ahead = w + steps * 4 * PANEL
            if odd == 1:
                _b1(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            elif odd == 2:
                _b2(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            elif odd == 3:
                _b3(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            elif odd == 4:
                _b4(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            elif odd == 5:
                _b5(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            else:
                _b6(a, x_stride, w, steps, o, out_stride, start, ahead, by)
            if _PREFETCHES[odd]:
                ahead += part
            for row in range(odd, rows, _MOST):
                _b6(
                    a + row * x_stride, x_stride, w, steps, o + row * out_stride, out_stride, start, ahead, by
                )
                ahead += part


def multiply(x: Any, weight: Any, block: Any, out: Any, first: Any, last: Any) -> None:
    """For compiled code: the one of the two that fits x."""


@overload(multiply)
def _multiply_overload(x: Any, weight: Any, block: Any, out: Any, first: Any, last: Any) -> Any:
    kernel = multiply_bfloat16 if x.dtype == types.uint16 else multiply_float32

    def product(x: Any, weight: Any, block: Any, out: Any, first: Any, last: Any) -> None:
        kernel(x, weight, block, out, first, last)

    return product
