"""GENERATION_FIRST, both ends. Prefill: `OfferBook` keeps decode's offers, and `KvPusher` fills their blocks. Decode:
`PushReceiver` offers blocks and waits.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from trtllm_disagg.engines.embedded.kv_transfer.base import BlockPairs, PeerMetadata
from trtllm_disagg.engines.embedded.kv_transfer.connections import (
    SUCCESS,
    LateTransfer,
    Outcome,
    PeerConnections,
    as_disagg_error,
    take_all,
)
from trtllm_disagg.engines.embedded.kv_transfer.control import (
    Failure,
    Notice,
    Offer,
    PeerGoneError,
    Reply,
    StillOffered,
    Watch,
    Withdraw,
    new_ticket,
)
from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError, OverloadedError
from trtllm_disagg.wire.kv_handle import UNREADABLE, socket_path

_REMEMBERED = 4096
_MAX_OFFERS = 4096
GIVEN_UP = "the decode worker has given up on this request"


class Push:
    """One accepted offer. Every write runs inside `operation`, so that `stopped` is exact."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        #: Number of prompt blocks that decode has or that are being written.
        self.num_sent = offer.num_known
        self.bytes_moved = 0
        #: Decode has given up.
        self.is_withdrawn = False
        #: Set once no write runs or can begin.
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._operations = 0
        self._closed = False
        #: A write timed out and may still land: `stopped` stays unset until `landed`.
        self.may_land_later = False

    @contextlib.contextmanager
    def operation(self) -> Iterator[bool]:
        """Yields False if the push is closed: then do not write."""
        with self._lock:
            allowed = not self._closed
            self._operations += allowed
        try:
            yield allowed
        finally:
            with self._lock:
                self._operations -= allowed
                self._stop_if_due()

    def close(self) -> None:
        """Let no further operation begin."""
        with self._lock:
            self._closed = True
            self._stop_if_due()

    def landed(self) -> None:
        """The late write has ended."""
        with self._lock:
            self.may_land_later = False
            self._stop_if_due()

    def _stop_if_due(self) -> None:
        if self._closed and not self._operations and not self.may_land_later:
            self.stopped.set()


class _Remembered(dict[Hashable, None]):
    """The latest ids, with constant-time lookup: the engine looks up every waiting request at each offer."""

    def add(self, each: Hashable) -> None:
        self.pop(each, None)
        self[each] = None
        if len(self) > _REMEMBERED:
            del self[next(iter(self))]


class _Open(NamedTuple):
    offer: Offer
    end: float


class OfferBook:
    """Thread-safe. Offers arrive on the control channel, before or after their request."""

    def __init__(
        self,
        layout: bytes,
        on_news: Callable[[], None],
        stop_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A withdrawal waits `stop_seconds` for a running write."""
        self._stop_seconds = stop_seconds
        self._layout = layout
        self._on_news = on_news
        self._clock = clock
        self._lock = threading.Lock()
        #: Offers that no request has claimed yet, by request.
        self._open: dict[int, _Open] = {}
        self._pushes: dict[bytes, Push] = {}
        self._withdrawn = _Remembered()
        #: Requests that decode or prefill abandoned before both offer and request had arrived.
        self._abandoned_by_decode = _Remembered()
        self._abandoned_by_prefill = _Remembered()
        self._has_news = threading.Event()

    # -- the control channel's threads

    def offered(self, offer: Offer) -> bytes:
        """Answers OK, or the reason of the refusal."""
        if (
            offer.layout != self._layout
            or offer.num_known > len(offer.blocks)
            or socket_path(offer.endpoint) is None
        ):
            return Reply.UNFIT
        with self._lock:
            self._drop_void()
            if offer.ticket in self._withdrawn:
                return Reply.WITHDRAWN
            if offer.request in self._abandoned_by_prefill:
                return Reply.ABANDONED
            if offer.request in self._open or any(
                push.offer.request == offer.request for push in self._pushes.values()
            ):
                return Reply.CLAIMED
            if len(self._open) >= _MAX_OFFERS:
                return Reply.FULL
            self._open[offer.request] = _Open(offer, self._clock() + offer.seconds)
        self._wake_engine()
        return Reply.OK

    def withdrawn(self, withdraw: Withdraw) -> bytes:
        """Answers STOPPED if decode may reuse the blocks, BUSY if it must ask again."""
        with self._lock:
            self._withdrawn.add(withdraw.ticket)
            known = self._open.get(withdraw.request)
            if known is not None and known.offer.ticket == withdraw.ticket:
                del self._open[withdraw.request]
            push = self._pushes.get(withdraw.ticket)
            if push is None:
                self._abandoned_by_decode.add(withdraw.request)
        if push is None:
            self._wake_engine()
            return Reply.STOPPED
        push.is_withdrawn = True
        push.close()
        self._wake_engine()
        return Reply.STOPPED if push.stopped.wait(self._stop_seconds) else Reply.BUSY

    def watched(self, watch: Watch) -> bytes:
        """Answers the tickets that this engine does not work on, as a msgpack list."""
        with self._lock:
            known = {entry.offer.ticket for entry in self._open.values()} | self._pushes.keys()
        return msgspec.msgpack.encode([ticket for ticket in watch.tickets if ticket not in known])

    # -- the engine's thread

    def take_news(self) -> bool:
        """True if an offer or a withdrawal arrived since the last call."""
        if not self._has_news.is_set():
            return False
        # Cleared only if seen set: an offer in between would wake the engine for nothing.
        self._has_news.clear()
        return True

    def take(self, request: int) -> Push | None:
        """Turn the request's offer into a push, kept until `forget`; None without an offer."""
        with self._lock:
            known = self._open.pop(request, None)
            if known is None or known.end <= self._clock():
                return None
            push = self._pushes[known.offer.ticket] = Push(known.offer)
            return push

    def was_abandoned_by_decode(self, request: int) -> bool:
        """True if decode withdrew this request before `take`."""
        with self._lock:
            return request in self._abandoned_by_decode

    def abandon(self, request: int) -> None:
        """Drop the request's offer, and refuse a later one."""
        with self._lock:
            self._abandoned_by_prefill.add(request)
            self._open.pop(request, None)

    def forget(self, push: Push) -> None:
        """Drop a push after its notice or failure, unless a write may still land: a withdrawal must find that one."""
        with self._lock:
            if not push.may_land_later:
                self._pushes.pop(push.offer.ticket, None)

    def _wake_engine(self) -> None:
        self._has_news.set()
        self._on_news()

    def _drop_void(self) -> None:
        now = self._clock()
        for request in [request for request, known in self._open.items() if known.end <= now]:
            del self._open[request]


@dataclass(frozen=True, slots=True)
class Move:
    """An ended step of a push: decode's prefix was read; decode accepted the notice; all writes of a failed push
    stopped; the failure was sent to decode; or a transfer failed.
    """

    push: Push
    kind: Literal["read", "delivered", "stopped", "failure_sent", "failed"]
    outcome: Outcome = SUCCESS
    #: Blocks of this engine that a late read may still fill.
    filled: tuple[int, ...] = ()


class KvPusher:
    """Runs each push's moves in order, on its decode engine's thread."""

    def __init__(self, peers: PeerConnections, on_finished: Callable[[], None]) -> None:
        self._peers = peers
        self._on_finished = on_finished
        self._finished: queue.SimpleQueue[Move] = queue.SimpleQueue()

    def read(self, push: Push, first: int, local: list[int]) -> None:
        """Read decode's blocks from index `first` on into the blocks `local`."""
        self._submit(push, lambda: self._read(push, first, local), local)

    def write(self, push: Push, first: int, local: list[int]) -> None:
        """Write the blocks `local` into decode's blocks from index `first` on."""
        self._submit(push, lambda: self._write(push, first, local))

    def deliver(self, push: Push, notice: Notice) -> None:
        """Send the notice after all writes, with `bytes_moved` filled in."""
        self._submit(push, lambda: self._deliver(push, notice))

    def fail(self, push: Push, reason: str) -> None:
        """Begin no further move, and try to send decode a Failure."""
        push.close()
        self._peers.threads.submit(push.offer.endpoint, self._send_failure, push, reason)

    def take_finished(self) -> list[Move]:
        return take_all(self._finished)

    def _submit(self, push: Push, move: Callable[[], None], filled: Sequence[int] = ()) -> None:
        """`filled`: this engine's blocks that the move fills."""
        self._peers.threads.submit(push.offer.endpoint, self._run, push, move, tuple(filled))

    # -- on the decode engine's thread

    def _run(self, push: Push, move: Callable[[], None], filled: tuple[int, ...]) -> None:
        with push.operation() as allowed:
            outcome = Outcome(KvTransferError(GIVEN_UP))
            if allowed:
                outcome = self._peers.attempt(push.offer.endpoint, move)
                if outcome.error is None:
                    return
                if outcome.late is not None and not filled:
                    push.may_land_later = True
                push.close()
        self._finish(Move(push, "failed", outcome, filled))

    def _read(self, push: Push, first: int, local: list[int]) -> None:
        self._peers.transport.read(*self._blocks(push, first, local), self._peers.timeouts.transfer)
        # As with a lease, decode confirms afterwards that the blocks were untouched.
        if self._send(push, StillOffered(push.offer.ticket)) != Reply.HELD:
            raise KvTransferError(GIVEN_UP)
        self._finish(Move(push, "read"))

    def _write(self, push: Push, first: int, local: list[int]) -> None:
        blocks = self._blocks(push, first, local)
        push.bytes_moved += self._peers.transport.write(*blocks, self._peers.timeouts.transfer)

    def _deliver(self, push: Push, notice: Notice) -> None:
        notice = msgspec.structs.replace(notice, bytes_moved=push.bytes_moved)
        try:
            answer = self._send(push, notice)
        except KvTransferError:  # the connection may have been an old one
            answer = self._send(push, notice)
        if answer != Reply.CLAIMED:
            raise KvTransferError(GIVEN_UP)
        push.close()
        self._finish(Move(push, "delivered"))

    def _send_failure(self, push: Push, reason: str) -> None:
        # A peer's moves run in order, so none runs now.
        self._finish(Move(push, "stopped"))
        with contextlib.suppress(KvTransferError):
            self._send(push, Failure(push.offer.ticket, reason[:1000], push.stopped.is_set()))
        self._finish(Move(push, "failure_sent"))

    def _blocks(self, push: Push, first: int, local: list[int]) -> tuple[PeerMetadata, BlockPairs]:
        """A transport's arguments: decode's metadata, and its blocks from index `first` on with the blocks `local`."""
        remote = push.offer.blocks[first : first + len(local)]
        return self._peers.peer_with(push.offer.endpoint, remote), BlockPairs.of(remote, local)

    def _send(self, push: Push, message: Notice | Failure | StillOffered) -> bytes:
        return self._peers.send(push.offer.endpoint, message)

    def _finish(self, move: Move) -> None:
        self._finished.put(move)
        self._on_finished()


# Decode's end: it offers blocks, and a prefill engine writes into them. Decode may give up at any time, but reuses its
# blocks only once the writer confirms that it stopped, or is dead; it asks until then.

_tickets = msgspec.msgpack.Decoder(list[bytes])
_REFUSALS = {
    Reply.UNFIT.value: "their layout, count or endpoint does not fit its engine",
    Reply.CLAIMED.value: "this disagg_request_id was offered before",
    Reply.WITHDRAWN.value: "the decode worker has withdrawn them",
    Reply.BAD.value: "its engine takes no offers",
}


@dataclass(slots=True, kw_only=True, eq=False)
class Expected:
    """One request's KV, expected from a prefill engine."""

    #: Prefill's control channel.
    endpoint: str
    offer: Offer
    #: time.monotonic() seconds at which decode gives up.
    end: float = math.inf
    #: Prefill may know of these blocks.
    is_offered: bool = False
    notice: Notice | None = None
    error: DisaggError | None = None
    #: Prefill no longer writes into the blocks.
    stopped: bool = False


class PushReceiver:
    """Keeps the expected KV. Each entry leaves exactly once: by a notice, a failure, or when decode gives up."""

    def __init__(
        self,
        peers: PeerConnections,
        *,
        on_news: Callable[[], None],
        on_busy: Callable[[], None],
    ) -> None:
        """`on_busy` is called when a peer may begin to write here."""
        self._peers = peers
        self._on_busy = on_busy
        self._on_news = on_news
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Expected] = {}
        #: Tickets of accepted notices: prefill resends one if the answer was lost.
        self._accepted: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._closed = threading.Event()
        self._watching: set[str] = set()
        self._watcher = threading.Thread(target=self._watch_all, name="kv-watch", daemon=True)
        self._watcher.start()

    # -- the engine's thread

    def expect(self, expected: Expected) -> None:
        with self._lock:
            self._waiting[expected.offer.ticket] = expected
        self._on_busy()
        self._peers.threads.submit(expected.endpoint, self._offer, expected)

    def give_up(self, expected: Expected) -> LateTransfer | None:
        """The transfer that may still write into the blocks; None if they may be reused."""
        with self._lock:
            self._waiting.pop(expected.offer.ticket, None)
            if expected.stopped:
                return None
        # Queued behind the offer on the peer's thread: only there is it known whether the offer was sent.
        late = LateTransfer(expected.endpoint, lambda: self._withdraw(expected))
        self._peers.late.add(late)
        return late

    def decline(self, endpoint: str, request: int) -> None:
        """Tell prefill that no offer comes for this request. Best effort: prefill's wait has a deadline."""
        self._peers.threads.submit(endpoint, self._decline, endpoint, request)

    @property
    def is_busy(self) -> bool:
        """True while a peer may write here."""
        return bool(self._waiting or self._peers.late)

    def close(self) -> None:
        self._closed.set()
        self._watcher.join(timeout=5)

    # -- the control channel's threads

    def noticed(self, notice: Notice) -> bytes:
        return self._settle(notice.ticket, notice=notice, stopped=True)

    def failed(self, failure: Failure) -> bytes:
        error = KvTransferError(f"prefill: {failure.reason}")
        return self._settle(failure.ticket, error=error, stopped=failure.stopped)

    def still_offered(self, question: StillOffered) -> bytes:
        return Reply.HELD if question.ticket in self._waiting else Reply.GONE

    def _settle(
        self, ticket: bytes, *, notice: Notice | None = None, error: DisaggError | None = None, stopped: bool
    ) -> bytes:
        with self._lock:
            expected = self._waiting.pop(ticket, None)
            if expected is None:
                return Reply.CLAIMED if notice is not None and ticket in self._accepted else Reply.GONE
            if notice is not None:
                self._accepted.append(ticket)
            expected.notice, expected.error, expected.stopped = notice, error, stopped
        self._on_news()
        return Reply.CLAIMED

    # -- on the prefill engine's thread

    def _offer(self, expected: Expected) -> None:
        if expected.offer.ticket not in self._waiting:
            return
        endpoint = expected.endpoint
        try:
            self._peers.metadata.of(endpoint)  # raises if our KV does not fit
            expected.is_offered = True
            answer = self._peers.send(endpoint, expected.offer)
        except Exception as raised:
            error = as_disagg_error(raised, endpoint)
            is_lost = isinstance(error, KvTransferError)
            if is_lost:
                self._peers.metadata.drop(endpoint)
            # Prefill may have accepted an offer even if its answer was lost.
            may_be_claimed = is_lost and expected.is_offered and not isinstance(error, PeerGoneError)
            self._settle(expected.offer.ticket, error=error, stopped=not may_be_claimed)
        else:
            if answer != Reply.OK:
                self._settle(expected.offer.ticket, error=_refused(answer), stopped=True)

    def _decline(self, endpoint: str, request: int) -> None:
        with contextlib.suppress(DisaggError):
            self._peers.send(endpoint, Withdraw(request, new_ticket()))

    def _withdraw(self, expected: Expected) -> bool:
        """True once prefill cannot write into the blocks any more."""
        if not expected.is_offered:  # prefill does not know of it
            self._decline(expected.endpoint, expected.offer.request)
            return True
        question = Withdraw(expected.offer.request, expected.offer.ticket)
        try:
            return self._peers.send(expected.endpoint, question) == Reply.STOPPED
        except PeerGoneError:
            return True  # it wrote by system calls, which end with the process
        except KvTransferError:
            return False

    # -- is the writer alive?

    def _watch_all(self) -> None:
        while not self._closed.wait(self._peers.timeouts.ask):
            with self._lock:
                waiting = [e for e in self._waiting.values() if e.is_offered]
            for endpoint in {e.endpoint for e in waiting}:
                tickets = [e.offer.ticket for e in waiting if e.endpoint == endpoint]
                if endpoint not in self._watching:  # one question at a time
                    self._watching.add(endpoint)
                    self._peers.threads.submit(endpoint, self._watch, endpoint, tickets)

    def _watch(self, endpoint: str, tickets: list[bytes]) -> None:
        self._watching.discard(endpoint)
        try:
            lost = _tickets.decode(self._peers.send(endpoint, Watch(tickets)))
            reason = f"prefill worker {endpoint} ended this request without a notice or a failure message"
        except PeerGoneError:
            lost, reason = tickets, f"prefill worker {endpoint} is gone"
        except (KvTransferError, *UNREADABLE):
            return  # the peer may come back; every expectation has a deadline
        # stopped=False: a withdrawal asks that first. Requests that ended meanwhile prove no loss.
        replies = [self._settle(ticket, error=KvTransferError(reason), stopped=False) for ticket in lost]
        if Reply.CLAIMED in replies:
            self._peers.metadata.drop(endpoint)


def _refused(answer: bytes) -> DisaggError:
    if answer == Reply.FULL:
        return OverloadedError("the prefill worker has too many offers")
    if answer == Reply.ABANDONED:
        return KvTransferError("the prefill worker has given up on this request")
    reason = _REFUSALS.get(answer) or answer.decode(errors="replace")[:100]
    return HandoffRefusedError(f"the prefill worker does not take these blocks: {reason}")
