"""The ranks as the forward sees them: tensors are gathered and summed, in an order that never changes.

mpi4py with plain buffers, nothing is pickled. Nothing is left to MPI's own reductions either: their order of
summation depends on the size of the message, and so on what else is in the batch.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trtllm_disagg.embedded.ipc.link import listen
from trtllm_disagg.embedded.tensor_parallel.channel import Peer, accept, connect
from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_disagg.embedded.params.llm_args import LlmArgs

_JOIN_SECONDS = 60.0
_GRACE_SECONDS = 3.0
_ADDRESS_BYTES = 256
#: All ranks are on one host: mpich opens no port. NIXL reads the same variable, later, for transfers.
_MPI_TRANSPORTS = "self,sm"


class RankGroup:
    """Every method is collective: all ranks call it, with tensors of the same shape."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank: int = communicator.rank
        self.size: int = communicator.size

    def part(self, count: int) -> slice:
        """This rank's part of `count` things; the parts differ by at most one."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """(..., n) -> (..., size * n): every rank's columns, by rank, on every rank."""
        width = x.shape[-1]
        every = self._gather(x.reshape(-1, width))
        # Not -1: a step that samples nothing has no rows.
        return every.transpose(0, 1).reshape(*x.shape[:-1], self.size * width)

    def collect_columns(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """(rows, this rank's part of `count`) -> (rows, count) on rank 0; the others get `x` back."""
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        if self.rank:
            self._communicator.Gatherv(_bytes(x), None, root=0)
            return x
        ends = [(rank + 1) * count // self.size for rank in range(self.size)]
        widths = np.diff([0, *ends])
        assert width == widths[0]
        flat = torch.empty(rows * count, dtype=x.dtype)
        sizes = widths * rows * x.element_size()
        starts = np.cumsum(sizes) - sizes
        self._communicator.Gatherv(_bytes(x), [_bytes(flat), sizes, starts, _byte_type()], root=0)
        whole = torch.split(flat, [int(each) * rows for each in widths])
        parts = [part.view(rows, int(each)) for part, each in zip(whole, widths, strict=True)]
        return torch.cat(parts, dim=1).view(*x.shape[:-1], count)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """(...) -> (size, ...)"""
        every = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._communicator.Allgather(_bytes(x), _bytes(every))
        return every


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _byte_type() -> Any:
    from mpi4py import MPI

    return MPI.BYTE


def join_as_leader(size: int, on_lost: Callable[[str], None]) -> tuple[RankGroup, list[Peer]]:
    """Waits for the others. `on_lost` is called, from a thread, when they do not come: no call of MPI returns then.

    Raises ConfigError when the ranks are not `size`, or not all on this host.
    """
    with _deadline(lambda: on_lost(f"the other ranks did not come up within {_JOIN_SECONDS:.0f} s")):
        group, communicator = _start_mpi()
        listener, address = listen()
        with listener:
            told = np.zeros(_ADDRESS_BYTES, np.uint8)
            told[: len(address)] = np.frombuffer(address.encode(), np.uint8)
            communicator.Bcast(told, root=0)
            if group.size != size:
                raise ConfigError.bad_value(
                    "tensor_parallel_size", size, f"{group.size}, the ranks there are"
                )
            if not _is_one_host(communicator):
                raise ConfigError.bad_value("tensor_parallel_size", size, "ranks that are all on one host")
            peers = accept(listener, size)
        _forget_shared_memory()
    return group, peers


def join_as_follower() -> tuple[RankGroup, Peer]:
    """Ends the process when rank 0 does not come."""
    with _deadline(lambda: os._exit(1)):
        group, communicator = _start_mpi()
        told = np.zeros(_ADDRESS_BYTES, np.uint8)
        communicator.Bcast(told, root=0)
        _is_one_host(communicator)
    return group, connect(bytes(told).rstrip(b"\0").decode(), group.rank)


def leave() -> None:
    """The end of MPI in this process; waits for the other ranks."""
    from mpi4py import MPI

    MPI.Finalize()


def _start_mpi() -> tuple[RankGroup, Any]:
    with _environment("UCX_TLS", _MPI_TRANSPORTS):
        from mpi4py import MPI  # its import starts MPI

    # Of its own: what one engine says is never taken for what another one says.
    return RankGroup(MPI.COMM_WORLD.Dup()), MPI.COMM_WORLD


def _is_one_host(communicator: Any) -> bool:
    from mpi4py import MPI

    return bool(communicator.Split_type(MPI.COMM_TYPE_SHARED).size == communicator.size)


def _forget_shared_memory() -> None:
    """Every rank has mpich's memory mapped by now; without its name, nothing is left behind by `kill -9`."""
    with open("/proc/self/maps") as maps:
        names = set(re.findall(r"/dev/shm/mpich_shm_\w+", maps.read()))
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _deadline(on_late: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(_JOIN_SECONDS, on_late)
    timer.daemon = True
    timer.start()
    # While MPI starts it holds Python's lock, and no thread runs: then the kernel ends this process.
    signal.setitimer(signal.ITIMER_REAL, _JOIN_SECONDS + _GRACE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        timer.cancel()


def use_cpus(args: LlmArgs, rank: int) -> None:
    """Threads and processors of this rank; each gets its share of the processors when there are enough."""
    torch.set_num_threads(args.embedded.num_threads)
    if (cpus := args.embedded.cpu_affinity) is not None:
        os.sched_setaffinity(0, cpus[rank :: args.tensor_parallel_size] or cpus)
