"""Multiply-adds in vectors, of float32 or of pairs of bfloat16 (LLVM IR), and functions that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    declare,
    emit_fma,
    pointer,
    splat,
)


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
    """`emit(builder, arithmetic, *addresses and counts)` as a function that numba code calls with an array, whose type
    decides the arithmetic, and a tuple of integers. It has all registers to itself.
    """

    @intrinsic
    def call(typing: Any, like: Any, arguments: Any) -> Any:
        arithmetic = BFLOAT16 if like.dtype == types.uint16 else FLOAT32

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            full_name = f"{name}_{like.dtype}"
            function = builder.module.globals.get(full_name)
            if function is None:
                kind = ir.FunctionType(ir.VoidType(), [I64] * num_arguments)
                function = ir.Function(builder.module, kind, full_name)
                function.linkage = "internal"
                function.attributes.add("noinline")
                inner = ir.IRBuilder(function.append_basic_block())
                emit(inner, arithmetic, *function.args)
                inner.ret_void()
            builder.call(function, unpack_tuple(builder, values[1]))
            return context.get_dummy_value()

        return types.void(like, types.UniTuple(types.intp, num_arguments)), generate

    return call
