"""Runs a kernel's parts on torch's threads, those of the OpenMP library that torch has loaded.

Each thread takes the next part until none is left, so a late thread, or one that shares its processor, does less. A
part's bits do not depend on its thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compiled
from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import BYTE_POINTER, I32, I64, borrowed, pointer

#: What a thread of OpenMP runs, and how a team of them is asked to: GOMP_parallel(task, data, threads, flags).
_TASK = ir.FunctionType(ir.VoidType(), [BYTE_POINTER])
_FORK = ir.FunctionType(ir.VoidType(), [_TASK.as_pointer(), BYTE_POINTER, I32, I32])


def _gomp_parallel() -> int:
    try:
        fork = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return 0
    return ctypes.cast(fork, ctypes.c_void_p).value or 0


#: Its address; 0 where torch has another OpenMP, or none.
GOMP_PARALLEL = _gomp_parallel()


def num_threads() -> int:
    """That compute the parts of a kernel."""
    return torch.get_num_threads() if GOMP_PARALLEL else 1


def in_parts(part_of: Any) -> Callable[..., None]:
    """Of a kernel part_of(part, *arguments), a function (parts, *arguments) that calls it for each part on as many
    threads as torch has; parts are counted from 0.
    """

    @intrinsic
    def run_parts(typing: Any, fork: Any, threads: Any, parts: Any, arguments: Any) -> Any:
        given = (types.intp, *arguments.types)
        called = types.Dispatcher(part_of).get_call_type(typing, given, {})

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            address, size, count, packed = values
            part = part_of.overloads[called.args]
            context.active_code_library.add_linking_library(part.library)
            frame_type = ir.LiteralStructType([I64, I64, packed.type])
            frame = cgutils.alloca_once(builder, frame_type)
            for i, value in enumerate((I64(0), count, packed)):
                builder.store(value, cgutils.gep_inbounds(builder, frame, 0, i))

            def emit_part(b: Any, number: Any, given: Any) -> None:
                context.call_internal_no_propagate(b, part.fndesc, called, [number, *given])

            task = _task(builder.module, frame_type, emit_part)
            data = builder.bitcast(frame, BYTE_POINTER)
            with builder.if_else(builder.icmp_signed("==", address, I64(0))) as (alone, together):
                with alone:
                    builder.call(task, [data])
                with together:
                    team = builder.trunc(size, I32)
                    builder.call(pointer(builder, address, _FORK), [task, data, team, I32(0)])
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, arguments), generate

    def run(fork: Any, threads: Any, parts: Any, arguments: Any) -> None:
        run_parts(fork, threads, parts, borrowed(arguments))

    # Its code is kept under its name.
    run.__name__ = run.__qualname__ = f"{part_of.py_func.__name__}_in_parts"
    kernel = compiled()(run)

    def call(parts: int, *arguments: Any) -> None:
        threads = min(parts, num_threads())
        kernel(GOMP_PARALLEL if threads > 1 else 0, threads, parts, arguments)

    return call


def _task(module: Any, frame_type: Any, emit_part: Callable[[Any, Any, Any], None]) -> Any:
    """A function that takes parts until there are no more. Its frame: the next part, the number of parts, arguments."""
    task = ir.Function(module, _TASK, module.get_unique_name("task"))
    task.linkage = "internal"
    b = ir.IRBuilder(task.append_basic_block("entry"))
    frame = b.bitcast(task.args[0], frame_type.as_pointer())
    following, count, packed = (cgutils.gep_inbounds(b, frame, 0, i) for i in range(3))
    count, given = b.load(count), cgutils.unpack_tuple(b, b.load(packed))
    loop, body, done = (b.append_basic_block(name) for name in ("next", "part", "done"))
    b.branch(loop)
    b.position_at_end(loop)
    number = b.atomic_rmw("add", following, I64(1), "monotonic")
    b.cbranch(b.icmp_signed("<", number, count), body, done)
    b.position_at_end(body)
    emit_part(b, number, given)
    b.branch(loop)
    b.position_at_end(done)
    b.ret_void()
    return task
