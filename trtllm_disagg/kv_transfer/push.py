"""GENERATION_FIRST, the prefill engine's end: `OfferBook` has decode's offers, `KvPusher` fills their blocks."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.base import KvTimeouts, PeerMetadata
from trtllm_disagg.kv_transfer.handle import is_endpoint
from trtllm_disagg.kv_transfer.messages import Failure, Notice, Offer, StillOffered, Watch, Withdraw
from trtllm_disagg.kv_transfer.peers import SUCCESS, Outcome, Peers, taken

_TIMEOUTS = KvTimeouts()
_REMEMBERED = 4096
_MAX_OFFERS = 4096
#: Of one peer: more than its batch holds, and few enough that it takes several to fill the book.
_MAX_OFFERS_OF_PEER = 1024
GIVEN_UP = "the decode worker has given up on this request"


class Push:
    """One accepted offer. Writes happen inside of `operation`, so that `stopped` can be known."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.bytes_moved = 0
        #: Decode has given up.
        self.is_withdrawn = False
        #: Nothing is written now, and nothing will be.
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._operations = 0
        self._closed = False
        self._may_land_later = False

    @contextlib.contextmanager
    def operation(self) -> Iterator[bool]:
        """Yields False when the push was closed before: then nothing may be written."""
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
        """No operation begins any more."""
        with self._lock:
            self._closed = True
            self._stop_if_due()

    @property
    def may_land_later(self) -> bool:
        return self._may_land_later

    def never_stops(self) -> None:
        """A write timed out, and may still arrive: as long as this process lives, it cannot say that it stopped."""
        self._may_land_later = True

    def _stop_if_due(self) -> None:
        if self._closed and not self._operations and not self._may_land_later:
            self.stopped.set()


class _Open(NamedTuple):
    offer: Offer
    end: float
    peer: str


class OfferBook:
    """Thread-safe. Offers come by the control channel, before or after the request that they belong to."""

    def __init__(
        self,
        name: str,
        layout: bytes,
        on_news: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        timeouts: KvTimeouts = _TIMEOUTS,
    ) -> None:
        self._stop_seconds = timeouts.stop
        self._name = name
        self._layout = layout
        self._on_news = on_news
        self._clock = clock
        self._lock = threading.Lock()
        #: By request: the offer, when it is void, and the peer that made it.
        self._open: dict[int, _Open] = {}
        self._pushes: dict[bytes, Push] = {}
        self._withdrawn: deque[bytes] = deque(maxlen=_REMEMBERED)
        #: Requests that decode, or prefill, has given up before they met.
        self._left_by_decode: deque[int] = deque(maxlen=_REMEMBERED)
        self._left_by_prefill: deque[int] = deque(maxlen=_REMEMBERED)
        self._has_news = threading.Event()

    # -- the control channel's threads

    def offered(self, offer: Offer, peer: str) -> bytes:
        """`ok`, or why not. `peer` is the channel's name of it, which it cannot choose."""
        if offer.prefill != self._name:
            return b"stranger"
        if (
            offer.layout != self._layout
            or offer.num_known > len(offer.blocks)
            or not is_endpoint(offer.endpoint)
        ):
            return b"unfit"
        with self._lock:
            self._drop_void()
            if offer.ticket in self._withdrawn:
                return b"withdrawn"
            if offer.request in self._left_by_prefill:
                return b"left"
            if offer.request in self._open or any(
                push.offer.request == offer.request for push in self._pushes.values()
            ):
                return b"taken"
            of_sender = sum(1 for known in self._open.values() if known.peer == peer)
            if len(self._open) >= _MAX_OFFERS or of_sender >= _MAX_OFFERS_OF_PEER:
                return b"full"
            self._open[offer.request] = _Open(offer, self._clock() + offer.seconds, peer)
        self._tell_news()
        return b"ok"

    def withdrawn(self, withdraw: Withdraw) -> bytes:
        """`stopped`: the blocks are decode's own again. `busy`: not yet, ask again."""
        if withdraw.prefill != self._name:
            return b"stopped"  # the engine that was meant is dead
        with self._lock:
            self._withdrawn.append(withdraw.ticket)
            known = self._open.get(withdraw.request)
            if known is not None and known.offer.ticket == withdraw.ticket:
                del self._open[withdraw.request]
            push = self._pushes.get(withdraw.ticket)
            if push is None:
                self._left_by_decode.append(withdraw.request)
        if push is None:
            self._tell_news()
            return b"stopped"
        push.is_withdrawn = True
        push.close()
        self._tell_news()
        return b"stopped" if push.stopped.wait(self._stop_seconds) else b"busy"

    def watched(self, watch: Watch) -> bytes:
        """Those of the tickets that this engine is not at, as a msgpack list."""
        if watch.prefill != self._name:
            return msgspec.msgpack.encode(watch.tickets)
        with self._lock:
            known = {entry.offer.ticket for entry in self._open.values()} | self._pushes.keys()
        return msgspec.msgpack.encode([ticket for ticket in watch.tickets if ticket not in known])

    @property
    def open_offers(self) -> list[Offer]:
        """Those that no request has come for yet."""
        with self._lock:
            return [entry.offer for entry in self._open.values()]

    # -- the engine's thread

    def take_news(self) -> bool:
        """Something was offered or withdrawn since the last call."""
        has_news = self._has_news.is_set()
        self._has_news.clear()
        return has_news

    def take(self, request: int) -> Push | None:
        """The offer for a request, when it is there: from now on a push, until `forget`."""
        with self._lock:
            known = self._open.pop(request, None)
            if known is None or known.end <= self._clock():
                return None
            push = self._pushes[known.offer.ticket] = Push(known.offer)
            return push

    def was_left(self, request: int) -> bool:
        """Decode has given up on a request that it had not met here yet."""
        with self._lock:
            return request in self._left_by_decode

    def leave(self, request: int) -> None:
        """Prefill has given up on it: a decode engine that offers, or has just offered, is told."""
        with self._lock:
            self._left_by_prefill.append(request)
            self._open.pop(request, None)

    def forget(self, push: Push) -> None:
        """It is over: decode has its notice, or was told. A write that may still land is remembered for good."""
        with self._lock:
            if not push.may_land_later:
                self._pushes.pop(push.offer.ticket, None)

    def _tell_news(self) -> None:
        self._has_news.set()
        self._on_news()

    def _drop_void(self) -> None:
        now = self._clock()
        for request in [request for request, known in self._open.items() if known.end <= now]:
            del self._open[request]


@dataclass(frozen=True, slots=True)
class Move:
    """What has ended: decode's prefix was read, notice was taken, every write of a push that failed, word of that to
    decode, or a move in an error.
    """

    push: Push
    what: Literal["read", "delivered", "stopped", "told", "broken"]
    outcome: Outcome = SUCCESS
    #: Own blocks that a late read may still fill.
    filled: tuple[int, ...] = ()


class KvPusher:
    """Each push's moves run in order, on its decode engine's worker, beside the engine's thread."""

    def __init__(self, peers: Peers, on_finished: Callable[[], None]) -> None:
        self._peers = peers
        self._on_finished = on_finished
        self._finished: queue.SimpleQueue[Move] = queue.SimpleQueue()
        #: Writes that have ended. Used by tests and statistics.
        self.writes = 0

    def read(self, push: Push, first: int, local: list[int]) -> None:
        """Fetch decode's blocks from the `first` on into `local`."""
        self._submit(push, lambda: self._read(push, first, local), local)

    def write(self, push: Push, first: int, local: list[int]) -> None:
        """Put `local` into decode's blocks from the `first` on."""
        self._submit(push, lambda: self._write(push, first, local))

    def deliver(self, push: Push, notice: Notice) -> None:
        """After all writes. `bytes_moved` of the notice is filled in when they have ended."""
        self._submit(push, lambda: self._deliver(push, notice))

    def fail(self, push: Push, reason: str) -> None:
        """No further move begins; decode is told, if it can be."""
        push.close()
        self._peers.workers.submit(push.offer.endpoint, self._tell, push, reason)

    def take_finished(self) -> list[Move]:
        return taken(self._finished)

    def _submit(self, push: Push, move: Callable[[], None], filled: Sequence[int] = ()) -> None:
        """`filled`: blocks of this engine that the move writes into."""
        self._peers.workers.submit(push.offer.endpoint, self._run, push, move, tuple(filled))

    # -- on the decode engine's worker

    def _run(self, push: Push, move: Callable[[], None], filled: tuple[int, ...]) -> None:
        with push.operation() as allowed:
            outcome = Outcome(KvTransferError(GIVEN_UP))
            if allowed:
                outcome = self._peers.attempt(push.offer.endpoint, move)
                if outcome.error is None:
                    return
                if outcome.late is not None and not filled:
                    push.never_stops()
                push.close()
        self._finish(Move(push, "broken", outcome, filled))

    def _read(self, push: Push, first: int, local: list[int]) -> None:
        self._peers.transport.read(*self._blocks(push, first, local), self._peers.timeouts.transfer)
        # As with a lease: decode, which holds the blocks, says afterwards whether they were touched.
        if self._say(push, StillOffered(push.offer.ticket)) != b"held":
            raise KvTransferError(GIVEN_UP)
        self._finish(Move(push, "read"))

    def _write(self, push: Push, first: int, local: list[int]) -> None:
        blocks = self._blocks(push, first, local)
        push.bytes_moved += self._peers.transport.write(*blocks, self._peers.timeouts.transfer)
        self.writes += 1

    def _deliver(self, push: Push, notice: Notice) -> None:
        notice = msgspec.structs.replace(notice, bytes_moved=push.bytes_moved)
        try:
            answer = self._say(push, notice)
        except KvTransferError:  # the connection may have been an old one
            answer = self._say(push, notice)
        if answer != b"taken":
            raise KvTransferError(GIVEN_UP)
        push.close()
        self._finish(Move(push, "delivered"))

    def _tell(self, push: Push, reason: str) -> None:
        # All moves of a peer run on this one thread, so none of them is under way now.
        self._finish(Move(push, "stopped"))
        with contextlib.suppress(KvTransferError):
            self._say(push, Failure(push.offer.ticket, reason[:1000], push.stopped.is_set()))
        self._finish(Move(push, "told"))

    def _blocks(
        self, push: Push, first: int, local: list[int]
    ) -> tuple[PeerMetadata, np.ndarray, np.ndarray]:
        """Those of decode that pair up with `local`, as a transport takes them."""
        offer = push.offer
        remote = offer.blocks[first : first + len(local)]
        decode = self._peers.peer_with(offer.endpoint, offer.decode, remote)
        return decode, np.asarray(remote, np.int32), np.asarray(local, np.int32)

    def _say(self, push: Push, message: Notice | Failure | StillOffered) -> bytes:
        return self._peers.say(push.offer.endpoint, message)

    def _finish(self, move: Move) -> None:
        self._finished.put(move)
        self._on_finished()
