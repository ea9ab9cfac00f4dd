"""A lease holds the blocks of a finished prefill: until `Finish`, an explicit release, or its expiry."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_REMEMBERED = 1024


@dataclass(slots=True)
class Lease:
    """Blocks that a sender keeps for a receiver: until `Finish`, an explicit release, or the expiry of the lease."""

    id: bytes
    request_id: int
    blocks: list[int]
    deadline: float  # time.monotonic() seconds
    digest: bytes = b""  # KvHandle.digest(), set when the handle is made
    begun: bool = False
    granted: float = 0.0


class LeaseTable:
    """Thread-safe. A lease leaves the table exactly once, whatever ends it first; only then may its blocks go.

    So when `finish` answers True, the blocks were untouched during everything that the receiver read before.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._by_id: dict[bytes, Lease] = {}
        self._by_request: dict[int, bytes] = {}
        self._ended: list[Lease] = []
        self._ended_early: deque[bytes] = deque(maxlen=_REMEMBERED)

    def grant(self, request_id: int, blocks: list[int]) -> Lease:
        now = self._clock()
        lease = Lease(secrets.token_bytes(16), request_id, blocks, now + self.seconds, granted=now)
        with self._lock:
            self._by_id[lease.id] = lease
            self._by_request[request_id] = lease.id
        return lease

    def begin(self, lease_id: bytes, digest: bytes) -> bool:
        """The receiver is about to read: True when it may. The lease then has its whole time again, once: a
        receiver that begins over and over cannot keep the blocks for ever.
        """
        with self._lock:
            lease = self._held(lease_id, digest)
            if lease is not None and not lease.begun:
                lease.begun, lease.deadline = True, self._clock() + self.seconds
            return lease is not None

    def finish(self, lease_id: bytes, digest: bytes) -> bool:
        """The receiver has read: True when the lease was still held and is the one that the receiver means."""
        with self._lock:
            lease = self._held(lease_id, digest)
            if lease is not None:
                self._end(lease)
            return lease is not None

    def has_ended_early(self, lease_id: bytes) -> bool:
        """This lease expired, or was given back by either side, before a receiver had read. Only the last ones are
        remembered.
        """
        with self._lock:
            return lease_id in self._ended_early

    def release(self, lease_id: bytes) -> None:
        """The receiver does not want the blocks."""
        with self._lock:
            if lease := self._by_id.get(lease_id):
                self._end_early(lease)

    def release_request(self, request_id: int) -> bool:
        with self._lock:
            lease_id = self._by_request.get(request_id)
            if lease_id is None:
                return False
            self._end_early(self._by_id[lease_id])
            return True

    def take_ended(self) -> list[Lease]:
        """Leases that ended since the last call, expired ones included. Their blocks are the caller's to free."""
        now = self._clock()
        with self._lock:
            for lease in [lease for lease in self._by_id.values() if lease.deadline <= now]:
                self._end_early(lease)
            ended, self._ended = self._ended, []
        return ended

    def next_deadline(self) -> float | None:
        with self._lock:
            return min((lease.deadline for lease in self._by_id.values()), default=None)

    def oldest(self) -> float | None:
        """When it was granted; None when there is none."""
        with self._lock:
            return next((lease.granted for lease in self._by_id.values()), None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._by_id)

    def _held(self, lease_id: bytes, digest: bytes) -> Lease | None:
        """The lease that the receiver means, unless it is over."""
        lease = self._by_id.get(lease_id)
        if lease is None or not lease.digest or not secrets.compare_digest(lease.digest, digest):
            return None
        if self._clock() >= lease.deadline:
            self._end_early(lease)
            return None
        return lease

    def _end_early(self, lease: Lease) -> None:
        self._ended_early.append(lease.id)
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        del self._by_id[lease.id]
        del self._by_request[lease.request_id]
        self._ended.append(lease)
