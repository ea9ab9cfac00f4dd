"""An engine's state per peer: metadata, a thread, and late transfers.

Every transfer uses `PeerConnections`, which loads the peer's metadata and reports the outcome.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from trtllm_disagg.engines.embedded.kv_transfer.base import (
    KvLayout,
    KvTimeouts,
    KvTransport,
    PeerMetadata,
    ReadTimeoutError,
)
from trtllm_disagg.engines.embedded.kv_transfer.control import (
    ControlClient,
    FromDecode,
    FromPrefill,
    PeerGoneError,
)
from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PEER_THREADS = 64
#: Bounds the metadata of restarted peers: each restart has a new name.
_MAX_KNOWN = 1024
_BUSY_SECONDS = 0.001
_IDLE_SECONDS = 0.02


def take_all(arrivals: queue.SimpleQueue[T]) -> list[T]:
    """Empty the queue without waiting; return its items."""
    found: list[T] = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(arrivals.get_nowait())
    return found


class PeerMetadataCache:
    """Metadata by endpoint: loaded at first contact, dropped with the peer. Used on the peer's thread."""

    def __init__(self, client: ControlClient, check: Callable[[PeerMetadata], None], seconds: float) -> None:
        """`check` raises a DisaggError if the peer's KV does not fit ours; `seconds`: timeout of a load."""
        self._client = client
        self._check = check
        self._seconds = seconds
        self.known: dict[str, PeerMetadata] = {}
        #: Number of requests to peers.
        self.loads = 0

    def of(self, endpoint: str) -> PeerMetadata:
        """The metadata of the engine at this endpoint, which no other engine ever has."""
        return self.known.get(endpoint) or self._load(endpoint)

    def drop(self, endpoint: str) -> PeerMetadata | None:
        return self.known.pop(endpoint, None)

    def _load(self, endpoint: str) -> PeerMetadata:
        metadata = self._client.metadata(endpoint, self._seconds)
        self._check(metadata)
        self.loads += 1
        if len(self.known) >= _MAX_KNOWN:
            self.known.pop(next(iter(self.known)), None)
        self.known[endpoint] = metadata
        return metadata


class PeerThreads:
    """Runs each peer's work in order: a peer has one connection. A stalled peer delays only its own transfers, unless
    MAX_PEER_THREADS stall.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_PEER_THREADS, "kv-peer")
        # Starts a thread now: later the system may have none left.
        self._pool.submit(int)
        #: Each peer's calls; the first one is running, or comes next.
        self._waiting: dict[str, deque[Callable[[], object]]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, endpoint: str, work: Callable[..., object], *args: Any) -> None:
        """Callable from any thread. After `close` the work is dropped."""
        with self._lock:
            if self._closed:
                return
            waiting = self._waiting.setdefault(endpoint, deque())
            waiting.append(partial(work, *args))
            if len(waiting) == 1:
                # If the system has no further thread, an existing one runs it.
                with contextlib.suppress(RuntimeError):
                    self._pool.submit(self._run, endpoint, waiting)

    def close(self) -> None:
        """Wait for running work; drop work that has not begun."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(cancel_futures=True)

    def _run(self, endpoint: str, waiting: deque[Callable[[], object]]) -> None:
        while waiting and not self._closed:
            try:
                waiting[0]()
            except Exception:
                log.exception("work for the peer %s failed unexpectedly", endpoint)
            with self._lock:
                waiting.popleft()
                if not waiting:
                    del self._waiting[endpoint]


@dataclass(slots=True, eq=False)
class LateTransfer:
    """An abandoned transfer that may still touch blocks of this engine."""

    endpoint: str
    #: Called on the peer's thread until it returns True: no byte can land any more.
    has_ended: Callable[[], bool]
    ended: bool = False


class LateTransfers:
    """All late transfers of the engine. Checks each at once, then every `seconds` until it has ended."""

    def __init__(self, threads: PeerThreads, on_change: Callable[[], None], seconds: float) -> None:
        """`seconds`: check interval."""
        self._threads = threads
        self._on_change = on_change
        self._seconds = seconds
        self._lock = threading.Lock()
        #: Transfers that have not ended; True while a check runs.
        self._late: dict[LateTransfer, bool] = {}
        self._reported: set[LateTransfer] = set()
        self._news: queue.SimpleQueue[LateTransfer] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll_late, name="kv-late", daemon=True)
        self._thread.start()

    def __bool__(self) -> bool:
        return bool(self._late)

    def add(self, late: LateTransfer) -> None:
        with self._lock:
            self._late[late] = False
        self._ask_all()

    def take_news(self) -> list[LateTransfer]:
        """Transfers that ended since the last call; also, once each, those still running at their first check."""
        return take_all(self._news)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)

    def _poll_late(self) -> None:
        while not self._closed.wait(self._seconds):
            self._ask_all()

    def _ask_all(self) -> None:
        with self._lock:
            waiting = [late for late, is_asked in self._late.items() if not is_asked]
            self._late |= dict.fromkeys(waiting, True)
        for late in waiting:
            self._threads.submit(late.endpoint, self._ask, late)

    def _ask(self, late: LateTransfer) -> None:
        try:
            has_ended = late.has_ended()
        except Exception:
            log.exception("cannot check a late KV transfer with %s", late.endpoint)
            has_ended = False
        with self._lock:
            is_news = has_ended or late not in self._reported
            if has_ended:
                late.ended = True
                del self._late[late]
                self._reported.discard(late)
            else:
                self._late[late] = False
                self._reported.add(late)
        if is_news:
            self._news.put(late)
            self._on_change()


class Outcome(NamedTuple):
    """A transfer's end. `late`: the failed transfer may still write into its destination blocks."""

    error: DisaggError | None = None
    late: LateTransfer | None = None


SUCCESS = Outcome()


class PeerConnections:
    """Shared by transfers in both directions. `peer_with`, `attempt` and `send` run on the peer's thread."""

    def __init__(
        self,
        transport: KvTransport,
        layout: KvLayout,
        *,
        timeouts: KvTimeouts,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called from other threads when `late.take_news` has new entries."""
        self.transport = transport
        self.layout = layout
        self.timeouts = timeouts
        self.client = ControlClient()
        self.metadata = PeerMetadataCache(self.client, self._require_fits, timeouts.control)
        self.threads = PeerThreads()
        self.late = LateTransfers(self.threads, on_change, timeouts.ask)

    def peer_with(self, endpoint: str, blocks: list[int]) -> PeerMetadata:
        """Raises HandoffRefusedError if the peer's KV does not fit ours or it lacks these blocks; KvTransferError if it
        cannot be reached.
        """
        metadata = self.metadata.of(endpoint)
        if max(blocks, default=-1) >= metadata.num_blocks:
            raise HandoffRefusedError(
                f"the handoff names block {max(blocks)}; the peer has {metadata.num_blocks}"
            )
        return metadata

    def attempt(self, endpoint: str, transfer: Callable[[], None]) -> Outcome:
        """Run a transfer with this peer. Never raises: the engine waits for an outcome. A failure drops the peer's
        cached state.
        """
        late = None
        try:
            transfer()
            return SUCCESS
        except ReadTimeoutError as timeout:
            error: DisaggError = KvTransferError(str(timeout))
            if timeout.may_land_later:
                is_dead, has_ended = self._death_watch(endpoint), timeout.has_ended
                late = LateTransfer(endpoint, lambda: has_ended() or is_dead())
        except Exception as raised:
            error = as_disagg_error(raised, endpoint)
        if isinstance(error, KvTransferError):
            metadata = self.metadata.drop(endpoint)
            try:
                if metadata is not None and late is None:
                    self.transport.forget(metadata)
            except Exception:
                log.exception("cleaning up after a KV transfer with %s failed", endpoint)
        return Outcome(error, late)

    def send(self, endpoint: str, message: FromDecode | FromPrefill) -> bytes:
        """The peer's answer. Raises KvTransferError."""
        return self.client.ask(endpoint, message, self.timeouts.control)

    def close(self) -> None:
        self.late.close()
        self.threads.close()
        self.client.close()

    def _death_watch(self, endpoint: str) -> Callable[[], bool]:
        """A check for the peer's thread: True once the endpoint was closed for `KvTimeouts.dead` seconds. By then the
        process has ended and can send no more bytes.
        """
        gone_since = math.inf

        def is_dead() -> bool:
            nonlocal gone_since
            try:
                self.client.metadata(endpoint, self.timeouts.control)
                gone_since = math.inf
            except PeerGoneError:
                gone_since = min(gone_since, time.monotonic())
            except KvTransferError:  # slow, or stopped
                gone_since = math.inf
            return time.monotonic() - gone_since >= self.timeouts.dead

        return is_dead

    def _require_fits(self, metadata: PeerMetadata) -> None:
        self.layout.require_same(metadata.layout)
        if metadata.transport != self.transport.name:
            raise HandoffRefusedError(
                f"the peer moves KV by {metadata.transport}, this engine by {self.transport.name}; "
                "set the same cache_transceiver_config.backend on both"
            )


def as_disagg_error(error: Exception, endpoint: str) -> DisaggError:
    """Log an unexpected error and turn it into a KvTransferError."""
    if isinstance(error, DisaggError):
        return error
    log.error("a KV transfer with %s failed unexpectedly", endpoint, exc_info=error)
    return KvTransferError(f"{type(error).__name__}: {error}")


class ProgressThread:
    """Calls the transport's `progress`, since peers use an agent without a thread.

    Polls fast while a peer is expected, else slowly. It never stops: a reader may not know yet that its lease has
    ended, and a read that never ends would cost it its destination blocks.
    """

    def __init__(self, transport: KvTransport, is_busy: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_busy = is_busy
        self._expected = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-progress", daemon=True)
        self._thread.start()

    def expect_peer(self) -> None:
        """A peer may read or write from now on."""
        self._expected.set()

    def close(self) -> None:
        self._closed = True
        self._expected.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed:
            self._expected.wait(_BUSY_SECONDS if self._is_busy() else _IDLE_SECONDS)
            self._expected.clear()
            self._transport.progress()
