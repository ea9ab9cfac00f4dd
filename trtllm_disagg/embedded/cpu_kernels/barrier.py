"""How the threads of one compiled function wait for each other: a barrier, and a sleep that needs no interpreter."""

from __future__ import annotations

from typing import Any

from numba import types

from trtllm_disagg.embedded.cpu_kernels.compiled import compiled
from trtllm_disagg.embedded.cpu_kernels.llvm_ir import I64, emitted, pointer

#: Loads before the processor is offered to others: a few microseconds.
_SPINS = 4000

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_read = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp))


@emitted(types.int64, types.intp, types.int64)
def _atomic_add(builder: Any, address: Any, amount: Any) -> Any:
    """To the int64 at `address`; the value before."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), amount, "seq_cst")


@emitted(types.int64, types.intp)
def _atomic_load(builder: Any, address: Any) -> Any:
    return builder.load_atomic(pointer(builder, address, I64), "seq_cst", 8)


@compiled(inner=True)
def barrier_wait(counter: Any, num_threads: Any) -> None:
    """Return when each of the threads has called it as often as this one. `counter` is the address of an int64 that
    counts the calls of all, from zero on.
    """
    called = _atomic_add(counter, 1)
    target = called - called % num_threads + num_threads
    spins = 0
    while _atomic_load(counter) < target:
        spins += 1
        if spins >= _SPINS:
            spins = 0
            _sched_yield()


@compiled(inner=True)
def wait_for_event(event_fd: Any, scratch: Any) -> Any:
    """Block in the kernel until this eventfd is written to. False when something else ended the wait, a signal say.
    `scratch` is an int64 array of one.
    """
    return _read(event_fd, scratch.ctypes.data, 8) == 8


@compiled(inner=True)
def share_of(count: Any, rank: Any, num_threads: Any) -> Any:
    """(first, last) of this thread's part of `count` items."""
    return count * rank // num_threads, count * (rank + 1) // num_threads
