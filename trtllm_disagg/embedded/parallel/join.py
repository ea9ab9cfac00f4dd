"""From a process that mpich has started to a rank with its peers: MPI, then the sockets."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from trtllm_disagg.embedded.local_socket import listen
from trtllm_disagg.embedded.parallel.channel import Peer, accept, connect
from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_disagg.embedded.parallel.group import RankGroup

_JOIN_SECONDS = 60.0
_GRACE_SECONDS = 3.0
_ADDRESS_BYTES = 256
#: All ranks are on one host: mpich opens no port. NIXL reads the same variable, later, for transfers.
_MPI_TRANSPORTS = "self,sm"


def own_rank() -> int:
    """0 for rank 0, and for a process that is no rank of anything. MPI need not have started."""
    return int(os.environ.get("PMI_RANK", "0"))


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

    from trtllm_disagg.embedded.parallel.group import RankGroup

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
