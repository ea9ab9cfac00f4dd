"""LLVM IR for compiled code: vector arithmetic 16 floats wide, sums in a fixed order, loops, prefetches.

If a compiler may reorder sums, the same source gets other bits in another place; if it may not, sums are slow. So
reproducible sums are spelled out here: lane i adds every sixteenth element from i on, the lanes are added pairwise,
then the remaining elements one by one. Multiply-adds are always fused.

`emit_...` functions write IR with a builder; their values are IR values, addresses are int64. After them come functions
for numba code, and multiply-adds of float32 or of pairs of bfloat16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compiled

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
LANES = 16
FLOATS, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_I16, BYTE_POINTER = ir.IntType(16), ir.IntType(8).as_pointer()
_HALVES = ir.VectorType(_I16, LANES)
CACHE_LINE = 64
LOWEST = -3.0e38
#: exp of it is 2**-126, about.
_LEAST_EXPONENT = -87.33
_LOG2_E = 1.4426950408889634
#: What float32 drops of it.
_LOG2_E_LOW = 1.925963033500011e-8
#: 2**r on [0, 1) by the least relative error with 2**0 = 1, highest power first.
_POLYNOMIAL = (
    1.8671300495043397e-3,
    9.017030708491802e-3,
    5.579991266131401e-2,
    2.4016444385051727e-1,
    6.931512951850891e-1,
    1.0,
)
#: (builder, address, sixteen of them or one) -> float32
Load = Callable[[Any, Any, bool], Any]


def emitted(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `emit(builder, *values)` as a function that numba code calls with arguments of these numba types."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def function(typing: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if value is None else value

            return result(*arguments), generate

        # numba reads it, and would pass what `*given` takes as one tuple.
        function.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        function.__name__ = emit.__name__
        return intrinsic(function)

    return decorate


# -- values


def declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def pointer(builder: Any, address: Any, llvm_type: Any) -> Any:
    return builder.inttoptr(address, llvm_type.as_pointer())


def splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(WORDS, [0] * LANES))


def constant(llvm_type: Any, value: float) -> Any:
    """A number, or in every lane of a vector."""
    return ir.Constant(llvm_type, [value] * LANES if isinstance(llvm_type, ir.VectorType) else value)


def _call_float(builder: Any, name: str, *values: Any) -> Any:
    """LLVM's intrinsic `name`, from and to values of one type: FLOATS or F32."""
    number = values[0].type
    suffix = "v16f32" if number == FLOATS else "f32"
    return builder.call(declare(builder, f"llvm.{name}.{suffix}", number, [number] * len(values)), values)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _call_float(builder, "fma", a, b, c)


def load_float32(builder: Any, address: Any, wide: bool) -> Any:
    return builder.load(pointer(builder, address, FLOATS if wide else F32), align=4)


def load_bfloat16(builder: Any, address: Any, wide: bool) -> Any:
    stored, word, number = (_HALVES, WORDS, FLOATS) if wide else (_I16, I32, F32)
    bits = builder.zext(builder.load(pointer(builder, address, stored), align=2), word)
    return builder.bitcast(builder.shl(bits, constant(word, 16)), number)


def loader_of(dtype: Any) -> tuple[Load, int]:
    """How elements of this numba type become float32, and their bytes. bfloat16 is kept as uint16."""
    return (load_bfloat16, 2) if dtype == types.uint16 else (load_float32, 4)


def emit_prefetch(builder: Any, address: Any, cache_level: Literal[1, 2]) -> None:
    """The cache line at `address` will be read soon. Any address will do, also one that is not there."""
    fetch = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [BYTE_POINTER, I32, I32, I32])
    builder.call(fetch, [builder.inttoptr(address, BYTE_POINTER), I32(0), I32(4 - cache_level), I32(1)])


# -- loops and sums


def emit_loop(
    b: Any, first: Any, last: Any, by: int, start: list[Any], body: Callable[..., Any]
) -> list[Any]:
    """`body(i, states)` gives the next states, from `start` on; the last ones. None for no states."""
    before, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.cbranch(b.icmp_signed("<", first, last), loop, after)
    b.position_at_end(loop)
    i, current = b.phi(I64), [b.phi(state.type) for state in start]
    results, following = body(i, current) or [], b.add(i, I64(by))
    end = b.block  # the body may have made blocks of its own
    i.add_incoming(first, before)
    i.add_incoming(following, end)
    b.cbranch(b.icmp_signed("<", following, last), loop, after)
    b.position_at_end(after)
    final = [b.phi(state.type) for state in start]
    for phi, exit_phi, at_first, at_next in zip(current, final, start, results, strict=True):
        for each in (phi, exit_phi):
            each.add_incoming(at_first, before)
            each.add_incoming(at_next, end)
    return final


def emit_in_steps(b: Any, count: Any, step: int, body: Callable[[Any, int], None]) -> None:
    """`body(i, step)` for i from 0 to `count`, `step` at a time, then `body(i, 1)` for the remaining ones."""
    full = b.and_(count, I64(-step))
    emit_loop(b, I64(0), full, step, [], lambda i, _: body(i, step))
    if step > 1:
        emit_loop(b, full, count, 1, [], lambda i, _: body(i, 1))


def emit_dots(b: Any, xs: Sequence[Any], ys: Sequence[Any], count: Any, load_y: Load, item: int) -> list[Any]:
    """The sum of x[i] * y[i] for each x, and of each x for each y: float32, elements of y `item` bytes long."""

    def products(i: Any, totals: list[Any], wide: bool) -> list[Any]:
        at, offset = b.mul(i, I64(4)), b.mul(i, I64(item))
        values = [load_float32(b, b.add(x, at), wide) for x in xs]
        others = [load_y(b, b.add(y, offset), wide) for y in ys]
        pairs = product(values, others)
        return [emit_fma(b, value, other, t) for (value, other), t in zip(pairs, totals, strict=True)]

    return _emit_sums(b, len(xs) * len(ys), count, products)


def _emit_sums(b: Any, n: int, count: Any, add: Callable[[Any, list[Any], bool], list[Any]]) -> list[Any]:
    """`add(i, totals, wide)` gives n totals plus their elements i, or elements i to i + 15 lane by lane."""
    full = b.and_(count, I64(-LANES))
    zeros = [constant(FLOATS, 0.0)] * n
    lanes = emit_loop(b, I64(0), full, LANES, zeros, lambda i, totals: add(i, totals, True))
    return emit_loop(b, full, count, 1, _emit_lane_sums(b, lanes), lambda i, totals: add(i, totals, False))


def _emit_lane_sums(b: Any, vectors: list[Any]) -> list[Any]:
    """The sum of each vector's lanes, pairwise: i and i + 8, then i and i + 4, and so on. One vector or a power of two:
    halves of different vectors are added side by side.
    """
    n, width = len(vectors), LANES
    while width > 1:
        width //= 2
        lanes = vectors[0].type.count * min(2, len(vectors))
        low = [start + i for start in range(0, lanes, 2 * width) for i in range(width)]
        order = ir.VectorType(I32, len(low))
        lower, upper = ir.Constant(order, low), ir.Constant(order, [i + width for i in low])
        pairs = zip_longest(vectors[::2], vectors[1::2], fillvalue=ir.Constant(vectors[0].type, ir.Undefined))
        vectors = [b.fadd(b.shuffle_vector(x, y, lower), b.shuffle_vector(x, y, upper)) for x, y in pairs]
    return [b.extract_element(vectors[0], I32(i)) for i in range(n)]


def _emit_maximum(b: Any, a: Any, count: Any) -> Any:
    def larger(i: Any, tops: list[Any]) -> list[Any]:
        (top,) = tops
        value = load_float32(b, b.add(a, b.mul(i, I64(4))), top.type == FLOATS)
        return [b.select(b.fcmp_ordered(">", value, top), value, top)]

    full = b.and_(count, I64(-LANES))
    (lanes,) = emit_loop(b, I64(0), full, LANES, [constant(FLOATS, LOWEST)], larger)
    top = constant(F32, LOWEST)
    for lane in range(LANES):
        value = b.extract_element(lanes, I32(lane))
        top = b.select(b.fcmp_ordered(">", value, top), value, top)
    return emit_loop(b, full, count, 1, [top], larger)[0]


def emit_exp(b: Any, x: Any) -> Any:
    """exp by 2**k * 2**r, relative error below 2e-7. Arguments up to 88; from -87 down it is nearly zero. Of what is no
    number the result is none either.
    """
    number, word = x.type, WORDS if x.type == FLOATS else I32
    lowest = constant(number, _LEAST_EXPONENT)
    x = b.select(b.fcmp_ordered("<", x, lowest), lowest, x)
    log2_e = constant(number, _LOG2_E)
    k = _call_float(b, "floor", b.fmul(x, log2_e))
    # Of a product that was rounded the fraction would have lost bits.
    r = emit_fma(b, x, log2_e, b.fneg(k))
    r = emit_fma(b, x, constant(number, _LOG2_E_LOW), r)
    power = constant(number, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        power = emit_fma(b, power, r, constant(number, coefficient))
    exponent = b.shl(b.add(b.fptosi(k, word), constant(word, 127)), constant(word, 23))
    return b.fmul(power, b.bitcast(exponent, number))


# -- for numba code


@emitted(types.void)
def noinline(builder: Any) -> None:
    """The function that calls this is never inlined: large loops do best with the registers to themselves."""
    builder.function.attributes.add("noinline")


@intrinsic
def borrowed(typing: Any, arrays: Any) -> Any:
    """An array, or a tuple of arrays, with views that count no references. Counts are atomic: threads that make views
    of one array in their loops would wait for each other. The caller must own the arrays as long as views exist.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _without_owner(context, builder, arrays, values[0])

    return arrays(arrays), generate


def _without_owner(context: Any, builder: Any, numba_type: Any, value: Any) -> Any:
    if isinstance(numba_type, types.BaseTuple):
        for i, each in enumerate(numba_type.types):
            item = _without_owner(context, builder, each, builder.extract_value(value, i))
            value = builder.insert_value(value, item, i)
    elif isinstance(numba_type, types.Array):
        array = context.make_array(numba_type)(context, builder, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        value = array._getvalue()
    return value


@emitted(types.float32, types.float32, types.float32, types.float32)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return emit_fma(builder, a, b, c)


@emitted(types.float32, types.float32)
def exp(builder: Any, x: Any) -> Any:
    """Of one number, and the same bits as in `exponentials`."""
    return emit_exp(builder, x)


@emitted(types.float32, types.intp, types.intp)
def _square(builder: Any, a: Any, count: Any) -> Any:
    return emit_dots(builder, [a], [a], count, load_float32, 4)[0]


@emitted(types.float32, types.intp, types.intp)
def _exponentials(b: Any, a: Any, count: Any) -> Any:
    top = _emit_maximum(b, a, count)
    tops = splat(b, top)

    def add(i: Any, totals: list[Any], wide: bool) -> list[Any]:
        address = b.add(a, b.mul(i, I64(4)))
        power = emit_exp(b, b.fsub(load_float32(b, address, wide), tops if wide else top))
        b.store(power, pointer(b, address, power.type), align=4)
        return [b.fadd(totals[0], power)]

    return _emit_sums(b, 1, count, add)[0]


@compiled(inline="always")
def exponentials(a: Any, count: Any) -> Any:
    """a[t] = exp(a[t] - the largest) for the first `count`; their sum. a is float32 without gaps."""
    return _exponentials(a.ctypes.data, count)


@compiled(inline="always")
def sum_of_squares(a: Any) -> Any:
    """Of a one-dimensional float32 array without gaps."""
    return _square(a.ctypes.data, a.shape[0])


# -- multiply-adds in vectors


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no stubs, and no such type
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


@dataclass(frozen=True)
class Arithmetic:
    """What a step is made of, in every lane: a float32, or a pair of bfloat16 numbers."""

    scalar: Any
    vector: Any
    #: The cache that weights are prefetched into; measured (docs/log/cpu-kernels.md).
    cache_level: Literal[1, 2]

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


FLOAT32, BFLOAT16 = Arithmetic(F32, FLOATS, 1), Arithmetic(I32, _PAIRS, 2)


def outlined(name: str, emit: Callable[..., None], num_arguments: int) -> Any:
    """`emit(builder, arithmetic, *addresses and counts)` as a function for numba code, called with an array, which
    decides the arithmetic by its type, and a tuple of integers. It has all registers to itself.
    """

    @intrinsic
    def call(typing: Any, like: Any, arguments: Any) -> Any:
        arithmetic = BFLOAT16 if like.dtype == types.uint16 else FLOAT32

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            full_name = f"{name}_{like.dtype}"
            function = builder.module.globals.get(full_name)
            if function is None:
                function_type = ir.FunctionType(ir.VoidType(), [I64] * num_arguments)
                function = ir.Function(builder.module, function_type, full_name)
                function.linkage = "internal"
                function.attributes.add("noinline")
                inner = ir.IRBuilder(function.append_basic_block())
                emit(inner, arithmetic, *function.args)
                inner.ret_void()
            builder.call(function, unpack_tuple(builder, values[1]))
            return context.get_dummy_value()

        return types.void(like, types.UniTuple(types.intp, num_arguments)), generate

    return call
