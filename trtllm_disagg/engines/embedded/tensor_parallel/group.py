"""The ranks of one engine on one host: sockets between rank 0 and the others for steps, KV transfers and liveness, and
the forward's collectives, which gather and sum tensors in a fixed order.

In an MPI collective a rank would wait for ever for a dead one. So a thread of every rank sleeps on the last socket, and
ends the process when it closes. Nothing is pickled: messages are msgpack, and mpi4py gets plain buffers. MPI's own
reductions are not used: their order of summation depends on the message's size, and so on the batch.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import torch

from trtllm_disagg.engines.embedded.ipc import sockets
from trtllm_disagg.engines.embedded.ipc.sockets import framed, receive_exactly, receive_frame
from trtllm_disagg.engines.embedded.kv_cache.memory import KvCommand
from trtllm_disagg.engines.embedded.kv_transfer.transports import ucx_environment
from trtllm_disagg.engines.embedded.model.rows import ForwardRow
from trtllm_disagg.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs

_HELLO = struct.Struct("<IIB")
_CHANNELS = range(3)
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")
_JOIN_SECONDS = 60.0
_GRACE_SECONDS = 3.0
_ADDRESS_BYTES = 256
#: All ranks are on one host, so mpich opens no port. NIXL later reads the same variable for transfers.
_MPI_TRANSPORTS = "self,sm"


class Channel:
    """Messages with a length prefix, over sockets of this user only (ipc/sockets.py)."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: Any) -> None:
        self.connection.sendall(framed(_encoder.encode(message)))

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Wait for the next message. Raises EOFError if the other rank is gone."""
        return decoder.decode(receive_frame(self.connection))


class OtherRank:
    """The connections to another rank."""

    def __init__(self, rank: int, pid: int, commands: Channel, transfers: Channel, lifeline: Channel) -> None:
        self.rank, self.pid = rank, pid
        self.commands, self.transfers, self.lifeline = commands, transfers, lifeline
        #: Rank 0: number of commands sent, and number that a read begun now must wait for (all but a running step).
        self.sent = self.settled = 0


def accept(listener: socket.socket, size: int) -> list[OtherRank]:
    """The `size - 1` ranks other than 0, by rank."""
    found: dict[tuple[int, int], Channel] = {}
    pids: dict[int, int] = {}
    while len(found) < len(_CHANNELS) * (size - 1):
        connection = sockets.accept(listener)
        rank, pid, channel = _HELLO.unpack(receive_exactly(connection, _HELLO.size))
        found[rank, channel] = Channel(connection)
        pids[rank] = pid
    return [OtherRank(r, pids[r], *(found[r, channel] for channel in _CHANNELS)) for r in range(1, size)]


def connect(address: str, rank: int) -> OtherRank:
    """Connect to rank 0."""
    channels = []
    for channel in _CHANNELS:
        connection = sockets.connect(address)
        connection.sendall(_HELLO.pack(rank, os.getpid(), channel))
        channels.append(Channel(connection))
    return OtherRank(0, 0, *channels)


def watch(other: OtherRank, decoder: msgspec.msgpack.Decoder[T], on_end: Callable[[T | None], None]) -> None:
    """When the other rank is gone, call `on_end` from a thread with its last message, if any."""

    def wait() -> None:
        last: T | None = None
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            last = other.lifeline.receive(decoder)
        on_end(last)

    threading.Thread(target=wait, name=f"rank-{other.rank}-watch", daemon=True).start()


class RankLostError(EngineError):
    """A rank has died or cannot continue, so the engine cannot."""


class Build(msgspec.Struct, tag="build"):
    """Load your part of the model, and allocate this many blocks."""

    args: dict[str, Any]
    num_blocks: int


class Step(msgspec.Struct, tag="step"):
    rows: list[ForwardRow]


class Stop(msgspec.Struct, tag="stop"):
    pass


RankCommand = Build | Step | KvCommand | Stop


class Built(msgspec.Struct, tag="built"):
    pass


class Broken(msgspec.Struct, tag="broken"):
    """This rank cannot continue."""

    error_class: str
    message: str


Reply = Built | Broken


def step_of(rows: Seq[ForwardRow], tokens_per_block: int) -> Step:
    """A step's rows, each with only the blocks that the step uses."""
    return Step(
        [
            ForwardRow(
                row.tokens,
                row.num_computed,
                row.blocks[: -(-(row.num_computed + row.num_tokens) // tokens_per_block)],
                row.in_prefill,
                row.num_logits,
            )
            for row in rows
        ]
    )


class RankGroup:
    """All ranks must call each method, with tensors of the same shape."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank: int = communicator.rank
        self.size: int = communicator.size

    def part(self, count: int) -> slice:
        """This rank's part of `count` items; sizes differ by at most one."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """(..., n) -> (..., size * n): all ranks' columns by rank, on every rank."""
        width = x.shape[-1]
        every = torch.empty((self.size, x.numel() // width, width), dtype=x.dtype)
        self._communicator.Allgather(_bytes(x), _bytes(every))
        # Not -1: a step that samples nothing has no rows.
        return every.transpose(0, 1).reshape(*x.shape[:-1], self.size * width)

    def collect_columns(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """(rows, this rank's part of `count`) -> (rows, count) on rank 0; the others get `x` back."""
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        if self.rank:
            self._communicator.Gatherv(_bytes(x), None, root=0)
            return x
        from mpi4py import MPI

        ends = [(rank + 1) * count // self.size for rank in range(self.size)]
        widths = np.diff([0, *ends])
        assert width == widths[0]
        flat = torch.empty(rows * count, dtype=x.dtype)
        sizes = widths * rows * x.element_size()
        starts = np.cumsum(sizes) - sizes
        self._communicator.Gatherv(_bytes(x), [_bytes(flat), sizes, starts, MPI.BYTE], root=0)
        shards = torch.split(flat, [int(each) * rows for each in widths])
        parts = [part.view(rows, int(each)) for part, each in zip(shards, widths, strict=True)]
        return torch.cat(parts, dim=1).view(*x.shape[:-1], count)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def join_as_leader(size: int, on_lost: Callable[[str], None]) -> tuple[RankGroup, list[OtherRank]]:
    """Wait for the other ranks. If they do not join, calls `on_lost` from a thread: no MPI call would return.

    Raises ConfigError if there are not `size` ranks, or not all on this host.
    """
    with _deadline(lambda: on_lost(f"the other ranks did not join within {_JOIN_SECONDS:.0f} s")):
        group, communicator = _start_mpi()
        with sockets.Listener("core") as listener:
            address = np.frombuffer(listener.path.encode(), np.uint8)
            buffer = np.zeros(_ADDRESS_BYTES, np.uint8)
            buffer[: len(address)] = address
            communicator.Bcast(buffer, root=0)
            if group.size != size:
                raise ConfigError.bad_value(
                    "tensor_parallel_size", size, f"{group.size}, the number of ranks"
                )
            if not _is_one_host(communicator):
                raise ConfigError.bad_value("tensor_parallel_size", size, "all ranks on one host")
            others = accept(listener, size)
        _forget_shared_memory()
    return group, others


def join_as_follower() -> tuple[RankGroup, OtherRank]:
    """Join the ranks; end the process if rank 0 does not come."""
    with _deadline(lambda: os._exit(1)):
        group, communicator = _start_mpi()
        buffer = np.zeros(_ADDRESS_BYTES, np.uint8)
        communicator.Bcast(buffer, root=0)
        _is_one_host(communicator)
    return group, connect(bytes(buffer).rstrip(b"\0").decode(), group.rank)


def leave() -> None:
    """End MPI in this process, after the other ranks."""
    from mpi4py import MPI

    MPI.Finalize()


def _start_mpi() -> tuple[RankGroup, Any]:
    with ucx_environment({"UCX_TLS": _MPI_TRANSPORTS}):
        from mpi4py import MPI  # its import starts MPI

    # An own communicator separates the messages of several engines.
    return RankGroup(MPI.COMM_WORLD.Dup()), MPI.COMM_WORLD


def _is_one_host(communicator: Any) -> bool:
    from mpi4py import MPI

    return bool(communicator.Split_type(MPI.COMM_TYPE_SHARED).size == communicator.size)


def _forget_shared_memory() -> None:
    """Unlink mpich's memory, now mapped by every rank, so that `kill -9` leaves nothing behind."""
    with open("/proc/self/maps") as maps:
        names = set(re.findall(r"/dev/shm/mpich_shm_\w+", maps.read()))
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)


@contextlib.contextmanager
def _deadline(on_late: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(_JOIN_SECONDS, on_late)
    timer.daemon = True
    timer.start()
    # MPI holds the GIL while it starts, so no thread runs: the kernel ends this process instead.
    signal.setitimer(signal.ITIMER_REAL, _JOIN_SECONDS + _GRACE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        timer.cancel()


def use_cpus(args: LlmArgs, rank: int) -> None:
    """Set this rank's threads and its share of the processors, if there are enough."""
    torch.set_num_threads(args.embedded.num_threads)
    if (cpus := args.embedded.cpu_affinity) is not None:
        os.sched_setaffinity(0, cpus[rank :: args.tensor_parallel_size] or cpus)
