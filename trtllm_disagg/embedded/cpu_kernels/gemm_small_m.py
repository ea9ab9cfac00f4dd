"""Products of a few rows with a packed weight, at the speed at which memory delivers the weight.

The weight is oneDNN's own packed copy (linear.py): panels of 64 outputs, in a panel one line of 64 weights for
each input (float32), or for each pair of inputs (bfloat16). The inner loop is generated as vector code: `rows` x 64
sums stay in registers while the panel streams by. Sums run over the inputs in order, in blocks of `block` inputs
and their totals are added up: that is what oneDNN does, so the bits are the same whichever of the two runs. With
fewer or narrower registers a panel is read in parts, one behind the other: the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from trtllm_disagg.embedded.cpu_kernels.compiled import compiled
from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.embedded.cpu_kernels.gemm_amx import multiply_tiles
from trtllm_disagg.embedded.cpu_kernels.llvm_ir import (
    CACHE_LINE,
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    constant,
    declare,
    emit_fma,
    emit_prefetch,
    pointer,
    splat,
)
from trtllm_disagg.embedded.cpu_kernels.parallel import in_parts

PANEL = 64
#: More rows than this in one pass do not fit the registers.
_MOST = 6
_VECTORS = PANEL // LANES
#: At least so many products of two numbers for a thread that takes a part: some 20 us.
_PRODUCTS_OF_A_PART = 1 << 20
#: Bytes of a panel that one step, four bytes of a row of x, is multiplied with.
_STEP_BYTES = 4 * PANEL


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no stubs, and no such type
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


@dataclass(frozen=True)
class _Arithmetic:
    """What a step is made of, in every lane: a float32, or a pair of bfloat16 numbers."""

    scalar: Any
    vector: Any

    def emit_input(self, b: Any, address: Any) -> Any:
        return b.bitcast(splat(b, b.load(pointer(b, address, self.scalar), align=2)), self.vector)

    def emit_weights(self, b: Any, address: Any) -> Any:
        return b.load(pointer(b, address, self.vector), align=4)

    def emit_sum(self, b: Any, total: Any, given: Any, weights: Any) -> Any:
        """sum = given * weights + sum, fused; of pairs as the processor's instruction has it."""
        if self.vector == FLOATS:
            return emit_fma(b, given, weights, total)
        dot = declare(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, _PAIRS, _PAIRS])
        return b.call(dot, [total, weights, given])


_FLOAT32, _BFLOAT16 = _Arithmetic(F32, FLOATS), _Arithmetic(I32, _PAIRS)


def _vectors_at_once(rows: int) -> int:
    """How many of a panel's vectors are summed up at a time: as many sums as fit the registers beside every row's input
    and two weights.
    """
    registers, floats = this_cpu().vector_registers
    each = -(-LANES // floats)
    fitting = (n for n in (_VECTORS, _VECTORS // 2) if rows * n * each + rows + 2 <= registers)
    return next(fitting, 1)


def _prefetches_alone(rows: int) -> bool:
    """One pass over the weight, with no other: one that reads whole lines one after the other needs it least."""
    return rows == _MOST or _vectors_at_once(rows) < _VECTORS


def _pass_of(rows: int, prefetches: bool) -> Any:
    """`rows` rows through one block of one panel, as a function that numba code can call:

    (x as an array, (address of the rows, their stride, weights, steps, out, row stride of out, add?, prefetched
    address, bytes a prefetch)), addresses and strides in bytes. `add?` 0: out is written, else added to.
    """

    @intrinsic
    def product(typing: Any, x: Any, addresses: Any) -> Any:
        arithmetic = _BFLOAT16 if x.dtype == types.uint16 else _FLOAT32

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            inner = _function(builder.module, arithmetic, rows, prefetches)
            builder.call(inner, unpack_tuple(builder, arguments[1]))
            return context.get_dummy_value()

        return types.void(x, types.UniTuple(types.intp, 9)), generate

    return product


def _function(module: Any, arithmetic: _Arithmetic, rows: int, prefetches: bool) -> Any:
    """A function of its own, which has all registers to itself."""
    kind = "float32" if arithmetic is _FLOAT32 else "bfloat16"
    name = f"gemm_{rows}_{kind}" + ("_prefetching" if prefetches else "")
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 9), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    *given, prefetched, by = function.args
    at_once = _vectors_at_once(rows)
    for first in range(0, _VECTORS, at_once):
        before = builder.mul(builder.mul(given[3], by), I64(first))
        vectors = range(first, first + at_once)
        values = [*given, builder.add(prefetched, before), by]
        _emit_pass(builder, arithmetic, rows, prefetches, vectors, *values)
    builder.ret_void()
    return function


def _emit_pass(
    b: Any,
    arithmetic: _Arithmetic,
    rows: int,
    prefetches: bool,
    vectors: range,
    x: Any,
    x_stride: Any,
    weights: Any,
    steps: Any,
    out: Any,
    out_stride: Any,
    add: Any,
    prefetched: Any,
    by: Any,
) -> None:
    starts = [b.add(x, b.mul(x_stride, I64(r))) for r in range(rows)]
    before, loop, after = b.block, b.append_basic_block("steps"), b.append_basic_block("sums")
    b.branch(loop)
    b.position_at_end(loop)
    step, line, offset, soon = (b.phi(I64) for _ in range(4))
    totals = [[b.phi(FLOATS) for _ in vectors] for _ in range(rows)]
    if prefetches:
        for i in range(len(vectors)):
            emit_prefetch(b, b.add(soon, b.mul(by, I64(i))))
    inputs = [arithmetic.emit_input(b, b.add(start, offset)) for start in starts]
    sums: list[list[Any]] = [[] for _ in range(rows)]
    for i, v in enumerate(vectors):
        line_weights = arithmetic.emit_weights(b, b.add(line, I64(CACHE_LINE * v)))
        for r in range(rows):
            sums[r].append(arithmetic.emit_sum(b, totals[r][i], inputs[r], line_weights))
    advances = (
        (step, I64(0), I64(1)),
        (line, weights, I64(_STEP_BYTES)),
        (offset, I64(0), I64(4)),
        (soon, prefetched, b.mul(by, I64(len(vectors)))),
    )
    for counter, start, amount in advances:
        counter.add_incoming(start, before)
        counter.add_incoming(b.add(counter, amount), loop)
    for r in range(rows):
        for total, new in zip(totals[r], sums[r], strict=True):
            total.add_incoming(constant(FLOATS, 0.0), before)
            total.add_incoming(new, loop)
    b.cbranch(b.icmp_signed("<", b.add(step, I64(1)), steps), loop, after)
    b.position_at_end(after)
    adds = b.icmp_signed("!=", add, I64(0))
    for r in range(rows):
        for v, new in zip(vectors, sums[r], strict=True):
            place = pointer(b, b.add(b.add(out, b.mul(out_stride, I64(r))), I64(CACHE_LINE * v)), FLOATS)
            b.store(b.select(adds, b.fadd(b.load(place, align=4), new), new), place, align=4)


_alone_1, _alone_2, _alone_3, _alone_4, _alone_5, _alone_6 = (
    _pass_of(rows, _prefetches_alone(rows)) for rows in range(1, _MOST + 1)
)
#: Each prefetches its share of what the first one of the next block reads.
_beside_3, _beside_4, _beside_5, _beside_6 = (_pass_of(rows, True) for rows in range(3, _MOST + 1))


@compiled()
def multiply(x: Any, weight: Any, block: Any, out: Any, first: Any, last: Any) -> None:
    """out (rows, at least 64 * last) float32 = x (rows, inputs) float32, or bfloat16 as uint16, by panels `first` to
    `last` of the weight at address `weight`. x and out have their rows' elements side by side; for bfloat16 `block` is
    even. A negative one is `gemm_amx.as_block` of a weight that lies as tiles need it.
    """
    if block < 0:
        multiply_tiles(x, weight, out, 2 * first, min(2 * last, -block))
        return
    rows, inputs = x.shape
    item, x_stride, out_stride = x.itemsize, x.strides[0], out.strides[0]
    passes = (rows + _MOST - 1) // _MOST
    # Passes of equal rows: each has time for an equal share of the prefetches (docs/log.md).
    fewest, larger = rows // passes, rows % passes
    by = (CACHE_LINE + passes - 1) // passes
    for panel in range(first, last):
        for start in range(0, inputs, block):
            steps = min(block, inputs - start) * item // 4
            w = weight + (panel * inputs + start) * item * PANEL
            prefetched = w + steps * _STEP_BYTES
            row = 0
            for number in range(passes):
                count = fewest + (1 if number < larger else 0)
                a = x.ctypes.data + row * x_stride + item * start
                o = out.ctypes.data + row * out_stride + 4 * PANEL * panel
                _run_pass(count, passes, x, (a, x_stride, w, steps, o, out_stride, start, prefetched, by))
                prefetched += steps * _VECTORS * by
                row += count


@compiled(inner=True)
def multiply_part(part: Any, panels: Any, x: Any, weight: Any, block: Any, out: Any) -> None:
    first = part * panels
    multiply(x, weight, block, out, first, min(first + panels, out.shape[1] // PANEL))


_multiply_in_parts = in_parts(multiply_part)


def multiply_by_all(x: np.ndarray, weight: int, block: int, out: np.ndarray) -> None:
    """`multiply` by every panel, on several threads where there is enough for them to do."""
    num_panels = out.shape[1] // PANEL
    panels = -(-_PRODUCTS_OF_A_PART // max(1, x.size * PANEL))
    _multiply_in_parts(-(-num_panels // panels), panels, x, weight, block, out)


@compiled(inline="always")
def _run_pass(count: Any, passes: Any, x: Any, addresses: Any) -> None:
    if passes == 1:
        if count == 1:
            _alone_1(x, addresses)
        elif count == 2:
            _alone_2(x, addresses)
        elif count == 3:
            _alone_3(x, addresses)
        elif count == 4:
            _alone_4(x, addresses)
        elif count == 5:
            _alone_5(x, addresses)
        else:
            _alone_6(x, addresses)
    elif count == 3:
        _beside_3(x, addresses)
    elif count == 4:
        _beside_4(x, addresses)
    elif count == 5:
        _beside_5(x, addresses)
    else:
        _beside_6(x, addresses)
