"""A modelled engine's core: a clock replaces the model, and tokens do not depend on the steps' order. At the end, the
links that move KV.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from trtllm_disagg.common.machine import ProcessMark, own_mark
from trtllm_disagg.engines.embedded.core.engine_core import EngineCore
from trtllm_disagg.engines.embedded.ipc.messages import LogprobEntry, StepReport
from trtllm_disagg.engines.embedded.kv_transfer.base import (
    BlockPairs,
    PeerMetadata,
    ReadTimeoutError,
    decoded_address,
    require_running,
)
from trtllm_disagg.engines.embedded.model.rows import Sampled
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence
from trtllm_disagg.engines.modelled.step_times import Factors, StepPricer
from trtllm_disagg.engines.recording.result import checksum, extended, token_after
from trtllm_disagg.errors import HandoffRefusedError, KvTransferError


class Clock(Protocol):
    def now(self) -> float:
        """Modelled seconds."""

    def wait_until(self, moment: float) -> None:
        """Return at once if `moment` has passed."""


class ScaledClock:
    """This machine's monotonic clock, scaled. Engines on one machine with the same scale share the time."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def now(self) -> float:
        return time.monotonic() / self._scale

    def wait_until(self, moment: float) -> None:
        if (left := moment * self._scale - time.monotonic()) > 0:
            time.sleep(left)


class Texts:
    """Makes each next token from the sequence's tokens, so that every order gives the same text."""

    def __init__(self) -> None:
        #: By sequence of the last step: number of tokens in its checksum, and the checksum.
        self._sums: dict[Sequence, tuple[int, int]] = {}

    def next_tokens(self, sequences: list[Sequence]) -> list[int]:
        before, self._sums = self._sums, {}
        return [self._next(sequence, *before.get(sequence, (0, 0))) for sequence in sequences]

    def _next(self, sequence: Sequence, length: int, known: int) -> int:
        tokens = sequence.tokens
        if length != len(tokens):
            # `extended` works for an answer's tokens, but not for every prompt's.
            known = checksum(tokens, 0 if sequence.sampling.greedy else sequence.seed)
        token = token_after(known)
        self._sums[sequence] = len(tokens) + 1, extended(known, token)
        return token


class ClockedModel:
    """Ends each step when the GPU would. If there is more work, the next step begins at that moment, even if this
    process is later: a GPU's host works beside the GPU.
    """

    def __init__(self, pricer: StepPricer, factors: Factors, clock: Clock) -> None:
        self._pricer = pricer
        self._factors = factors
        self._clock = clock
        self._texts = Texts()
        #: No work is left, so the next step begins when work arrives.
        self.is_idle = True
        #: End and duration of the last step, in modelled seconds.
        self.end = 0.0
        self.seconds = 0.0
        #: Seconds by which this process was slower than the GPU in the last step.
        self.late = 0.0

    def run(self, rows: list[Row]) -> list[Sampled]:
        begin = max(self.end, self._clock.now()) if self.is_idle else self.end
        self.seconds = self._pricer.seconds(rows, self._factors)
        self.end = begin + self.seconds
        tokens = iter(self._texts.next_tokens([row.sequence for row in rows if row.samples]))
        made = [_certain(row, next(tokens) if row.samples else None) for row in rows if row.num_logits]
        self.late = max(0.0, self._clock.now() - self.end)
        self._clock.wait_until(self.end)
        return made

    def close(self) -> None:
        """Does nothing."""


def _certain(row: Row, token: int | None) -> Sampled:
    """A sample with a token of probability 1."""
    wants = token is not None and row.sequence.sampling.logprobs is not None
    of_prompt = [_entry(each) for each in row.scored(token)] if row.num_scored else ()
    return Sampled(token, _entry(token) if token is not None and wants else None, of_prompt)


def _entry(token: int) -> LogprobEntry:
    return [(token, 0.0, 1)]


@dataclass(kw_only=True, eq=False)
class ModelledCore(EngineCore):
    """An engine core that tells its model when it is idle."""

    model: ClockedModel
    time_scale: float

    def step(self) -> StepReport:
        report = super().step()
        self.model.is_idle = not self.scheduler.has_runnable
        for statistics in report.stats:
            statistics["modelled"] = {
                "stepMS": self.model.seconds * 1000,
                "lateMS": self.model.late * 1000,
                "timeScale": self.time_scale,
            }
        return report


# The links that move KV. Each engine has one link in and one out, shared evenly by its GPUs. Shared memory holds the
# time when a link is free: all engines of this host queue for it, first come, first served.

_MOMENT = struct.Struct("<d")
_NAME = "trtllm-disagg-link"


class LinkCost(msgspec.Struct, frozen=True):
    """One engine's end of a link."""

    seconds_per_block: float
    #: Seconds per transfer.
    latency: float
    #: Engines with different clock speeds cannot share a link.
    time_scale: float


class _Address(msgspec.Struct, frozen=True):
    process: ProcessMark
    #: That process's descriptors of the times when its link in and its link out are free.
    fd_in: int
    fd_out: int
    cost: LinkCost


def _new_link() -> int:
    """A file with the time when the link is free, in modelled seconds."""
    # A memfd leaves nothing behind after `kill -9`.
    link = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.pwrite(link, _MOMENT.pack(0.0), 0)
    return link


@contextlib.contextmanager
def _held(pid: int, link: int) -> Iterator[int]:
    """Lock that process's link with this descriptor. Raises OSError."""
    opened = os.open(f"/proc/{pid}/fd/{link}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # If that process closed its link, this number may name another file.
        if _NAME not in os.readlink(f"/proc/self/fd/{opened}"):
            raise OSError(f"descriptor {link} of process {pid} is no link")
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened
    finally:
        os.close(opened)


def _free_at(link: int) -> float:
    return float(_MOMENT.unpack(os.pread(link, _MOMENT.size, 0))[0])


class LinkTransport:
    """A `KvTransport` that takes time but moves no bytes: a transfer begins when both links are free, moves blocks at
    the slower end's speed, and arrives a latency later.
    """

    name = "MODELLED"

    def __init__(self, cost: LinkCost, block_bytes: int, clock: Clock) -> None:
        self._cost = cost
        self._block_bytes = block_bytes
        self._clock = clock
        self._in, self._out = _new_link(), _new_link()

    def serve(self, sender: str) -> bytes:
        return msgspec.msgpack.encode(_Address(own_mark(), self._in, self._out, self._cost))

    def read(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        theirs = self._other(peer)
        source, target = (theirs.process.pid, theirs.fd_out), (os.getpid(), self._in)
        return self._move(peer, theirs, source, target, len(blocks.local), timeout)

    def write(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        theirs = self._other(peer)
        source, target = (os.getpid(), self._out), (theirs.process.pid, theirs.fd_in)
        return self._move(peer, theirs, source, target, len(blocks.local), timeout)

    def forget(self, peer: PeerMetadata) -> None:
        """Does nothing: no peer state is cached."""

    def progress(self) -> None:
        """Does nothing: peers need no help."""

    def close(self) -> None:
        os.close(self._in)
        os.close(self._out)

    def _other(self, peer: PeerMetadata) -> _Address:
        address = decoded_address(peer, _Address)
        # Another process may have this id now, with other files under these descriptors.
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
        num_blocks: int,
        timeout: float,
    ) -> int:
        pace = max(self._cost.seconds_per_block, theirs.cost.seconds_per_block)
        try:
            # Always lock a link out before a link in, so that transfers cannot deadlock.
            with _held(*source) as leaving, _held(*target) as arriving:
                begin = max(self._clock.now(), _free_at(leaving), _free_at(arriving))
                end = begin + num_blocks * pace
                for link in (leaving, arriving):
                    os.pwrite(link, _MOMENT.pack(end), 0)
        except OSError as error:
            raise KvTransferError(f"{peer.sender} is gone: {error}") from error
        arrival = end + max(self._cost.latency, theirs.cost.latency)
        begun, allowed = self._clock.now(), timeout / self._cost.time_scale
        self._clock.wait_until(min(arrival, begun + allowed))
        if arrival > begun + allowed:
            raise ReadTimeoutError(
                f"the modelled links need {arrival - begun:.3g} s for {num_blocks} blocks; "
                f"kv_transfer_timeout_ms allows {allowed:.3g} s",
                may_land_later=False,
            )
        return num_blocks * self._block_bytes
