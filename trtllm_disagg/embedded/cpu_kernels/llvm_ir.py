"""Sums whose order is written down, sixteen lanes wide, for compiled code.

A compiler that may reorder sums gives the same source other bits in another place, and one that may not leaves them
slow. So sums that must be reproducible are spelled out here: lane i adds up every sixteenth element from i on, the
lanes are added pairwise at the end, and what is left over follows one by one. Multiply-adds are fused, always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

F32, I64 = ir.FloatType(), ir.IntType(64)
LANES = 16
FLOATS = ir.VectorType(F32, LANES)
_I16, _I32 = ir.IntType(16), ir.IntType(32)
_WORDS, _HALVES = ir.VectorType(_I32, LANES), ir.VectorType(_I16, LANES)
_LOWEST = -3.0e38
_LOG2_E = 1.4426950408889634
#: 2**r on [0, 1), highest power first.
_POLYNOMIAL = (
    1.5403530393381609e-4,
    1.3333558146428443e-3,
    9.618129107628477e-3,
    5.550410866482158e-2,
    2.402265069591007e-1,
    6.931471805599453e-1,
    1.0,
)
#: (builder, address, sixteen of them or one) -> float32
Load = Callable[[Any, Any, bool], Any]


@intrinsic
def on_its_own(typing: Any) -> Any:
    """The function that calls this is never inlined: large loops do best with the registers to themselves."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, float32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(declare_fma(builder, F32), arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def declare_fma(builder: Any, kind: Any) -> Any:
    """Of FLOATS or F32."""
    name = "llvm.fma.v16f32" if kind == FLOATS else "llvm.fma.f32"
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name)


def splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * LANES))


def load_float32(builder: Any, address: Any, wide: bool) -> Any:
    kind = FLOATS if wide else F32
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def load_bfloat16(builder: Any, address: Any, wide: bool) -> Any:
    stored, word, number = (_HALVES, _WORDS, FLOATS) if wide else (_I16, _I32, F32)
    bits = builder.zext(builder.load(builder.inttoptr(address, stored.as_pointer()), align=2), word)
    by = ir.Constant(word, [16] * LANES if wide else 16)
    return builder.bitcast(builder.shl(bits, by), number)


def emit_prefetch(builder: Any, address: Any, size: Any) -> None:
    """`size` bytes from `address` on will be read soon. Any address will do, also one that is not there."""
    pointer = ir.IntType(8).as_pointer()
    fetch = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32]), "llvm.prefetch.p0"
    )

    def one(offset: Any, nothing: Any) -> Any:
        place = builder.inttoptr(builder.add(address, offset), pointer)
        builder.call(fetch, [place, _I32(0), _I32(2), _I32(1)])
        return nothing

    emit_loop(builder, I64(0), size, I64(64), I64(0), one)


def emit_dot(builder: Any, a: Any, b: Any, count: Any, load_b: Load, item: int) -> Any:
    """The sum of a[i] * b[i]: a float32, elements of b `item` bytes long."""

    def product(i: Any, total: Any, wide: bool) -> Any:
        x = load_float32(builder, builder.add(a, builder.mul(i, I64(4))), wide)
        y = load_b(builder, builder.add(b, builder.mul(i, I64(item))), wide)
        return builder.call(declare_fma(builder, FLOATS if wide else F32), [x, y, total])

    return _emit_sum(builder, count, product)


def _emit_sum(b: Any, count: Any, add: Callable[[Any, Any, bool], Any]) -> Any:
    """`add(i, total, wide)` gives total plus element i, or elements i to i + 15 lane by lane."""
    whole = b.and_(count, I64(-LANES))
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    lanes = emit_loop(b, I64(0), whole, I64(LANES), zero, lambda i, total: add(i, total, True))
    width = LANES
    while width > 1:
        width //= 2
        order = [*range(width, 2 * width), *range(LANES - width)]
        moved = b.shuffle_vector(lanes, ir.Constant(FLOATS, ir.Undefined), ir.Constant(_WORDS, order))
        lanes = b.fadd(lanes, moved)
    total = b.extract_element(lanes, _I32(0))
    return emit_loop(b, whole, count, I64(1), total, lambda i, total: add(i, total, False))


def emit_loop(b: Any, first: Any, last: Any, by: Any, start: Any, body: Callable[[Any, Any], Any]) -> Any:
    """`body(i, state)` gives the next state, from `start` on; the last one. A state is a value, or a list of them."""
    many = isinstance(start, list)
    states = start if many else [start]
    before, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.cbranch(b.icmp_signed("<", first, last), loop, after)
    b.position_at_end(loop)
    i, current = b.phi(I64), [b.phi(state.type) for state in states]
    result = body(i, current if many else current[0])
    results, following = result if many else [result], b.add(i, by)
    end = b.block  # the body may have made blocks of its own
    i.add_incoming(first, before)
    i.add_incoming(following, end)
    b.cbranch(b.icmp_signed("<", following, last), loop, after)
    b.position_at_end(after)
    final = [b.phi(state.type) for state in states]
    for phi, exit_phi, at_first, at_next in zip(current, final, states, results, strict=True):
        phi.add_incoming(at_first, before)
        phi.add_incoming(at_next, end)
        exit_phi.add_incoming(at_first, before)
        exit_phi.add_incoming(at_next, end)
    return final if many else final[0]


@intrinsic
def _square(typing: Any, a: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_dot(builder, arguments[0], arguments[0], arguments[1], load_float32, 4)

    return types.float32(types.intp, types.intp), generate


@intrinsic
def _exponentials(typing: Any, a: Any, count: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        a, count = arguments
        top = _emit_maximum(b, a, count)
        tops = splat(b, top)

        def element(i: Any, total: Any, wide: bool) -> Any:
            address = b.add(a, b.mul(i, I64(4)))
            power = emit_exp(b, b.fsub(load_float32(b, address, wide), tops if wide else top), wide)
            b.store(power, b.inttoptr(address, (FLOATS if wide else F32).as_pointer()), align=4)
            return b.fadd(total, power)

        return _emit_sum(b, count, element)

    return types.float32(types.intp, types.intp), generate


def _emit_maximum(b: Any, a: Any, count: Any) -> Any:
    def larger(i: Any, top: Any) -> Any:
        value = load_float32(b, b.add(a, b.mul(i, I64(4))), top.type == FLOATS)
        return b.select(b.fcmp_ordered(">", value, top), value, top)

    whole = b.and_(count, I64(-LANES))
    lanes = emit_loop(b, I64(0), whole, I64(LANES), ir.Constant(FLOATS, [_LOWEST] * LANES), larger)
    top = ir.Constant(F32, _LOWEST)
    for lane in range(LANES):
        value = b.extract_element(lanes, _I32(lane))
        top = b.select(b.fcmp_ordered(">", value, top), value, top)
    return emit_loop(b, whole, count, I64(1), top, larger)


def emit_exp(b: Any, x: Any, wide: bool) -> Any:
    """exp by 2**k * 2**r, relative error below 4e-7. Arguments up to 88; from -87 down it is nearly zero."""
    number, word = (FLOATS, _WORDS) if wide else (F32, _I32)

    def constant(value: Any, kind: Any) -> Any:
        return ir.Constant(kind, [value] * LANES if wide else value)

    z = b.fmul(x, constant(_LOG2_E, number))
    lowest = constant(-126.0, number)
    z = b.select(b.fcmp_ordered(">", z, lowest), z, lowest)
    name = "llvm.floor.v16f32" if wide else "llvm.floor.f32"
    floor = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(number, [number]), name)
    k = b.call(floor, [z])
    r = b.fsub(z, k)
    power = constant(_POLYNOMIAL[0], number)
    for coefficient in _POLYNOMIAL[1:]:
        power = b.call(declare_fma(b, number), [power, r, constant(coefficient, number)])
    exponent = b.shl(b.add(b.fptosi(k, word), constant(127, word)), constant(23, word))
    return b.fmul(power, b.bitcast(exponent, number))


def exponentials(a: Any, count: Any) -> Any:
    """a[t] = exp(a[t] - the largest) for the first `count`; their sum. a is float32 without gaps."""


@overload(exponentials, inline="always")
def _exponentials_overload(a: Any, count: Any) -> Any:
    def of(a: Any, count: Any) -> Any:
        return _exponentials(a.ctypes.data, count)

    return of


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """Of one number, and the same bits as in `exponentials`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_exp(builder, arguments[0], False)

    return types.float32(types.float32), generate


def sum_of_squares(a: Any) -> Any:
    """Of a one-dimensional float32 array without gaps."""


@overload(sum_of_squares, inline="always")
def _squares_overload(a: Any) -> Any:
    def of(a: Any) -> Any:
        return _square(a.ctypes.data, a.shape[0])

    return of
