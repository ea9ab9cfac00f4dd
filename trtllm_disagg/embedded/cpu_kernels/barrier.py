"""How the threads of one compiled function meet: atomic counters, and a sleep that needs no interpreter."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trtllm_disagg.embedded.cpu_kernels.compiled import compiled

_I64 = ir.IntType(64)
#: Looks before the processor is offered to others: a few microseconds.
_PATIENCE = 4000

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_read = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp))


@intrinsic
def _add(typing: Any, address: Any, amount: Any) -> Any:
    """Atomically add to the int64 at `address`; the value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def _look(typing: Any, address: Any) -> Any:
    """The int64 at `address`, as the other threads left it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.intp), generate


@compiled(inner=True)
def meet(arrivals: Any, everybody: Any) -> None:
    """Return when the counter at this address has reached `everybody`, to which this call adds one."""
    _add(arrivals, 1)
    looks = 0
    while _look(arrivals) < everybody:
        looks += 1
        if looks >= _PATIENCE:
            looks = 0
            _sched_yield()


@compiled(inner=True)
def sleep_until_called(event_fd: Any, scratch: Any) -> Any:
    """Block in the kernel until somebody writes to this eventfd. False when something else ended the wait, a signal
    say. `scratch` is an int64 array of one.
    """
    return _read(event_fd, scratch.ctypes.data, 8) == 8


@compiled(inner=True)
def share(count: Any, rank: Any, size: Any) -> Any:
    """(first, last) of this rank's part of `count` things."""
    return count * rank // size, count * (rank + 1) // size
