"""The links that KV moves over, and a transport that moves no byte but takes the time.

Each engine has one link in and one link out, which its GPUs share evenly. The time at which a link is free
again is in shared memory, so that all engines of this host queue for it, first come, first served.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator

import msgspec
import numpy as np

from trtllm_disagg.engines.embedded.kv_transfer.base import (
    PeerMetadata,
    ReadTimeoutError,
    decoded_address,
    require_running,
)
from trtllm_disagg.engines.modelled.core import Clock
from trtllm_disagg.errors import HandoffRefusedError, KvTransferError
from trtllm_disagg.processes.machine import ProcessMark, own_mark

_MOMENT = struct.Struct("<d")
_NAME = "trtllm-disagg-link"


class LinkCost(msgspec.Struct, frozen=True):
    """The properties of one engine's end of a link."""

    seconds_per_block: float
    #: Seconds, once per transfer.
    latency: float
    #: Two engines with clocks of different speeds cannot share a link.
    time_scale: float


class _Address(msgspec.Struct, frozen=True):
    process: ProcessMark
    #: That process's descriptors with the times at which its link in, and its link out, is free.
    fd_in: int
    fd_out: int
    cost: LinkCost


class _Link:
    """Holds the time at which the link is free, in modelled seconds."""

    def __init__(self) -> None:
        # memfd: nothing is left behind by `kill -9`.
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.pwrite(self.fd, _MOMENT.pack(0.0), 0)

    def close(self) -> None:
        os.close(self.fd)


@contextlib.contextmanager
def _held(pid: int, link: int) -> Iterator[int]:
    """The link with this descriptor in that process, locked for this caller. Raises OSError."""
    opened = os.open(f"/proc/{pid}/fd/{link}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # A process that has closed its links may have opened another file under this number.
        if _NAME not in os.readlink(f"/proc/self/fd/{opened}"):
            raise OSError(f"descriptor {link} of process {pid} is no link")
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened
    finally:
        os.close(opened)


def _free_at(link: int) -> float:
    return float(_MOMENT.unpack(os.pread(link, _MOMENT.size, 0))[0])


class LinkTransport:
    """A `KvTransport`. A transfer begins when both links are free, takes its blocks at the pace of the slower end, and
    arrives a latency later.
    """

    name = "MODELLED"

    def __init__(self, cost: LinkCost, block_bytes: int, clock: Clock) -> None:
        self._cost = cost
        self._block_bytes = block_bytes
        self._clock = clock
        self._in, self._out = _Link(), _Link()

    def serve(self, sender: str) -> bytes:
        return msgspec.msgpack.encode(self._own)

    def read(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        theirs = self._other(peer)
        source, target = (theirs.process.pid, theirs.fd_out), (os.getpid(), self._in.fd)
        return self._move(peer, theirs, source, target, local_blocks, timeout)

    def write(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        theirs = self._other(peer)
        source, target = (os.getpid(), self._out.fd), (theirs.process.pid, theirs.fd_in)
        return self._move(peer, theirs, source, target, local_blocks, timeout)

    def forget(self, peer: PeerMetadata) -> None:
        """Nothing is cached about a peer."""

    def progress(self) -> None:
        """Peers need no help of this process."""

    def close(self) -> None:
        self._in.close()
        self._out.close()

    @property
    def _own(self) -> _Address:
        return _Address(own_mark(), self._in.fd, self._out.fd, self._cost)

    def _other(self, peer: PeerMetadata) -> _Address:
        address = decoded_address(peer, _Address)
        # Another process may have this id now, and something else open under these descriptors.
        require_running(peer, address.process)
        mine, theirs = self._cost.time_scale, address.cost.time_scale
        if mine != theirs:
            raise HandoffRefusedError(f"modelled.time_scale is {mine:g} here and {theirs:g} at {peer.sender}")
        return address

    def _move(
        self,
        peer: PeerMetadata,
        theirs: _Address,
        source: tuple[int, int],
        target: tuple[int, int],
        blocks: np.ndarray,
        timeout: float,
    ) -> int:
        pace = max(self._cost.seconds_per_block, theirs.cost.seconds_per_block)
        try:
            # A link out is always taken before a link in, so no two transfers wait for each other.
            with _held(*source) as leaving, _held(*target) as arriving:
                begin = max(self._clock.now(), _free_at(leaving), _free_at(arriving))
                end = begin + len(blocks) * pace
                for link in (leaving, arriving):
                    os.pwrite(link, _MOMENT.pack(end), 0)
        except OSError as error:
            raise KvTransferError(f"{peer.sender} is gone: {error}") from error
        arrival = end + max(self._cost.latency, theirs.cost.latency)
        begun, allowed = self._clock.now(), timeout / self._cost.time_scale
        self._clock.wait_until(min(arrival, begun + allowed))
        if arrival > begun + allowed:
            raise ReadTimeoutError(
                f"the modelled links need {arrival - begun:.3g} s for {len(blocks)} blocks; "
                f"kv_transfer_timeout_ms allows {allowed:.3g} s",
                may_land_later=False,
            )
        return len(blocks) * self._block_bytes
