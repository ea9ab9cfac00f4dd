"""CONTEXT_FIRST, both ends: `KvSender` leases a finished prefill's blocks, `KvReceiver` reads them.

A lease holds a finished prefill's blocks until `Finish`, a release, or its expiry.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_disagg.engines.embedded.kv_transfer.base import (
    BlockPairs,
    KvLayout,
    KvTimeouts,
    KvTransport,
    PeerMetadata,
)
from trtllm_disagg.engines.embedded.kv_transfer.connections import (
    SUCCESS,
    Outcome,
    PeerConnections,
    ProgressThread,
    take_all,
)
from trtllm_disagg.engines.embedded.kv_transfer.control import (
    Begin,
    ControlServer,
    Finish,
    MessageHandlers,
    Release,
    Reply,
)
from trtllm_disagg.errors import HandoffRefusedError, KvTransferError
from trtllm_disagg.wire.kv_handle import VERSION, KvHandle

_REMEMBERED = 1024


@dataclass(slots=True)
class Lease:
    """Blocks that a sender keeps for a receiver."""

    id: bytes
    request_id: int
    blocks: list[int]
    deadline: float  # time.monotonic() seconds
    digest: bytes = b""  # KvHandle.digest(), set when the handle is made
    begun: bool = False
    granted: float = 0.0


class LeaseTable:
    """Thread-safe. A lease leaves the table exactly once, and its blocks are freed only then.

    So if `finish` returns True, the blocks were untouched during the receiver's read.
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
        """True if the receiver may read. Restarts the lease's time once only, so that repeated calls cannot keep the
        blocks for ever.
        """
        with self._lock:
            lease = self._held(lease_id, digest)
            if lease is not None and not lease.begun:
                lease.begun, lease.deadline = True, self._clock() + self.seconds
            return lease is not None

    def finish(self, lease_id: bytes, digest: bytes) -> bool:
        """End the lease after the read: True if it was still held and has this digest."""
        with self._lock:
            lease = self._held(lease_id, digest)
            if lease is not None:
                self._end(lease)
            return lease is not None

    def has_ended_early(self, lease_id: bytes) -> bool:
        """True if this lease expired or was released before `finish`. Remembers only the latest such leases."""
        with self._lock:
            return lease_id in self._ended_early

    def release(self, lease_id: bytes) -> None:
        """End the lease without a read."""
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

    def handlers(self) -> MessageHandlers:
        """Handlers of the messages about leases."""
        return {
            Begin: lambda asked: self._reply(asked.lease, self.begin(asked.lease, asked.digest)),
            Finish: lambda asked: self._reply(asked.lease, self.finish(asked.lease, asked.digest)),
            Release: self._released,
        }

    def take_ended(self) -> list[Lease]:
        """Leases that ended or expired since the last call. The caller must free their blocks."""
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
        """When the oldest lease was granted; None without leases."""
        with self._lock:
            return next((lease.granted for lease in self._by_id.values()), None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._by_id)

    def _released(self, asked: Release) -> bytes:
        self.release(asked.lease)
        return Reply.OK

    def _reply(self, lease_id: bytes, is_held: bool) -> bytes:
        if is_held:
            return Reply.HELD
        return Reply.LATE if self.has_ended_early(lease_id) else Reply.GONE

    def _held(self, lease_id: bytes, digest: bytes) -> Lease | None:
        """The lease with this digest, unless it has ended."""
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


class KvSender:
    """Keeps the blocks of finished context_only requests until a receiver has read them."""

    def __init__(
        self,
        transport: KvTransport,
        layout: KvLayout,
        num_blocks: int,
        *,
        timeouts: KvTimeouts,
        on_lease_ended: Callable[[], None],
    ) -> None:
        self._layout = layout
        # The random part distinguishes an earlier process with the same pid.
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.leases = LeaseTable(timeouts.transfer)
        self._control = ControlServer(on_lease_ended)
        self.endpoint = self._control.endpoint
        address = transport.serve(self.name)
        self._metadata = PeerMetadata(self.name, transport.name, layout, num_blocks, address)
        self._expects: Callable[[], bool] = lambda: False
        self.progress_thread = ProgressThread(transport, lambda: len(self.leases) > 0 or self._expects())

    def start(
        self, handlers: MessageHandlers | None = None, expects: Callable[[], bool] = lambda: False
    ) -> None:
        """Start answering peers. `handlers` answer messages other than the leases'; `expects` returns True while a peer
        without a lease may read or write here.
        """
        self._expects = expects
        self._control.start(self._metadata, {**self.leases.handlers(), **(handlers or {})})

    def lease(
        self,
        request_id: int,
        blocks: list[int],
        *,
        prompt_digest: bytes,
        num_tokens: int,
        seed: int,
        cached_tokens: int,
    ) -> bytes:
        """Hold the blocks; return the `opaque_state` with which a receiver reads them."""
        lease = self.leases.grant(request_id, blocks)
        handle = KvHandle(
            version=VERSION,
            sender=self.name,
            endpoint=self.endpoint,
            lease=lease.id,
            layout=self._layout.fingerprint(),
            prompt=prompt_digest,
            num_tokens=num_tokens,
            blocks=blocks,
            seed=seed,
            cached_tokens=cached_tokens,
        )
        lease.digest = handle.digest()
        self.progress_thread.expect_peer()
        return handle.encode()

    def close(self) -> None:
        self.progress_thread.close()
        self._control.close()


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """One request's read of blocks `remote` into blocks `local`, index by index."""

    handle: KvHandle
    remote: list[int]
    local: list[int]
    #: Returns False once the request is aborted; the pull then does not begin.
    is_wanted: Callable[[], bool] = lambda: True
    #: Deadline for the start, set by `KvReceiver.start`.
    end: float = math.inf
    bytes_moved: int = 0
    #: If `late`, the read may still write into `local`: do not use those blocks before it has ended.
    outcome: Outcome = SUCCESS


class KvReceiver:
    """Reads blocks while the engine's thread runs steps; `take_finished` returns the ended reads.

    Each sender has a thread, for one pull at a time, so that a stalled sender delays no other.
    """

    def __init__(
        self,
        peers: PeerConnections,
        on_finished: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._on_finished = on_finished
        self._clock = clock
        self._finished: queue.SimpleQueue[Pull] = queue.SimpleQueue()

    def start(self, pull: Pull) -> None:
        pull.end = self._clock() + self._peers.timeouts.transfer
        self._peers.threads.submit(pull.handle.endpoint, self._run, pull)

    def release(self, handle: KvHandle) -> None:
        """Tell the sender that its blocks will not be read. Best effort: its lease expires."""
        self._peers.threads.submit(handle.endpoint, self._release, handle)

    def take_finished(self) -> list[Pull]:
        return take_all(self._finished)

    # -- on the sender's thread

    def _run(self, pull: Pull) -> None:
        handle = pull.handle
        if reason := self._why_not(pull):
            pull.outcome = Outcome(KvTransferError(reason))
        else:
            pull.outcome = self._peers.attempt(handle.endpoint, lambda: self._pull(pull))
        self._finished.put(pull)
        self._on_finished()
        # After the report, since the engine need not wait: frees the blocks if sender and lease are still alive.
        if isinstance(pull.outcome.error, KvTransferError) and self._clock() < pull.end:
            self._release(handle)

    def _why_not(self, pull: Pull) -> str:
        """Why the pull must not begin; empty if it may."""
        if not pull.is_wanted():
            return "the request was aborted before its KV was read"
        if self._clock() >= pull.end:
            seconds = self._peers.timeouts.transfer
            return f"{pull.handle.sender} was busy, or did not answer, for {seconds:g} s: its KV was not read"
        return ""

    def _pull(self, pull: Pull) -> None:
        handle, client, timeouts = pull.handle, self._peers.client, self._peers.timeouts
        sender = self._peers.peer_with(handle.endpoint, pull.remote)
        if handle.layout != self._peers.layout.fingerprint():
            raise HandoffRefusedError("the handoff's KV layout is not its prefill worker's")
        if pull.local:
            _require_held(handle, client.begin(handle, timeouts.control))
            blocks = BlockPairs.of(pull.remote, pull.local)
            pull.bytes_moved = self._peers.transport.read(sender, blocks, timeouts.transfer)
        _require_held(handle, client.finish(handle, timeouts.control))

    def _release(self, handle: KvHandle) -> None:
        with contextlib.suppress(KvTransferError):
            self._peers.client.release(handle, self._peers.timeouts.control)


def _require_held(handle: KvHandle, is_held: bool) -> None:
    if not is_held:
        raise HandoffRefusedError(
            f"prefill worker {handle.sender} does not hold this handoff (stale, used before, or forged)"
        )
