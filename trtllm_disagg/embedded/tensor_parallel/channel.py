"""Between rank 0 and the others, on one host: sockets for steps, for KV transfers, and to tell which ranks are alive;
and what rank 0 says on the first ones, as msgpack.

A rank that waits in an MPI collective for one that has died would wait for ever. So every rank has a thread that
sleeps on the last one, and ends the process when it closes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import msgspec

from trtllm_disagg.embedded.ipc import link as local_socket
from trtllm_disagg.embedded.kv_cache.memory import KvCommand
from trtllm_disagg.embedded.model.rows import ForwardRow
from trtllm_disagg.errors import EngineError
from trtllm_disagg.processes.framing import framed, receive_exactly, receive_frame

_HELLO = struct.Struct("<IIB")
_KINDS = range(3)
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class Channel:
    """Messages in order, each with its length in front. The sockets are this user's only (link.py)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        self._connection.sendall(framed(_encoder.encode(message)))

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Sleeps until there is one. Raises EOFError when the other side is gone."""
        return decoder.decode(receive_frame(self._connection))


class Peer:
    """Another rank, as this one sees it."""

    def __init__(self, rank: int, pid: int, commands: Channel, transfers: Channel, lifeline: Channel) -> None:
        self.rank, self.pid = rank, pid
        self.commands, self.transfers, self.lifeline = commands, transfers, lifeline


def accept(listener: socket.socket, size: int) -> list[Peer]:
    """The peers of rank 0, all `size - 1` of them, by rank."""
    found: dict[tuple[int, int], Channel] = {}
    pids: dict[int, int] = {}
    while len(found) < len(_KINDS) * (size - 1):
        connection = local_socket.accept(listener)
        rank, pid, kind = _HELLO.unpack(receive_exactly(connection, _HELLO.size))
        found[rank, kind] = Channel(connection)
        pids[rank] = pid
    return [Peer(r, pids[r], *(found[r, kind] for kind in _KINDS)) for r in range(1, size)]


def connect(address: str, rank: int) -> Peer:
    """Rank 0, from another rank."""
    channels = []
    for kind in _KINDS:
        connection = local_socket.connect(address)
        connection.sendall(_HELLO.pack(rank, os.getpid(), kind))
        channels.append(Channel(connection))
    return Peer(0, 0, *channels)


def watch(peer: Peer, decoder: msgspec.msgpack.Decoder[T], on_end: Callable[[T | None], None]) -> None:
    """Call `on_end` from a thread when the peer is gone, with its last word when it left one."""

    def wait() -> None:
        last: T | None = None
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            last = peer.lifeline.receive(decoder)
        on_end(last)

    threading.Thread(target=wait, name=f"rank-{peer.rank}-watch", daemon=True).start()


class RankLostError(EngineError):
    """A rank died, or cannot go on; without it no rank can."""


class Build(msgspec.Struct, tag="build"):
    """Load your part of the model, and make room for this many blocks."""

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
    """This rank cannot go on."""

    kind: str
    message: str


Reply = Built | Broken


def step_of(rows: Seq[ForwardRow], tokens_per_block: int) -> Step:
    """With as many blocks of each row as the step reads and writes."""
    return Step(
        [
            ForwardRow(
                row.tokens,
                row.num_computed,
                row.blocks[: -(-(row.num_computed + row.num_tokens) // tokens_per_block)],
                row.in_prefill,
                row.samples,
            )
            for row in rows
        ]
    )
