"""The prefill engine's side of offers: which there are, and when nothing can be written any more."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError
from trtllm_disagg.kv_transfer.base import KvTransport, PeerCard, ReadTimeoutError
from trtllm_disagg.kv_transfer.control import ControlClient
from trtllm_disagg.kv_transfer.handle import (
    Failure,
    Notice,
    Offer,
    StillOffered,
    Watch,
    Withdraw,
    is_endpoint,
)
from trtllm_disagg.kv_transfer.peers import Cards, Lanes

_REMEMBERED = 4096
_MAX_OFFERS = 4096
#: Of one peer: more than its batch holds, and few enough that it takes several to fill the book.
_MAX_OFFERS_OF_PEER = 1024
#: A withdrawal waits this long for a write that has begun.
_STOP_SECONDS = 1.0


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
        """A write timed out, and may still arrive: as long as this process lives, nobody can say that it stopped."""
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
    ) -> None:
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
            of_peer = sum(1 for known in self._open.values() if known.peer == peer)
            if len(self._open) >= _MAX_OFFERS or of_peer >= _MAX_OFFERS_OF_PEER:
                return b"full"
            self._open[offer.request] = _Open(offer, self._clock() + offer.seconds, peer)
        self._tell_news()
        return b"ok"

    def withdrawn(self, withdraw: Withdraw) -> bytes:
        """`stopped`: the blocks are decode's own again. `busy`: not yet, ask again."""
        if withdraw.prefill != self._name:
            return b"stopped"  # who was meant is dead
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
        return b"stopped" if push.stopped.wait(_STOP_SECONDS) else b"busy"

    def watched(self, watch: Watch) -> bytes:
        """Those of the tickets that nobody is at, as a msgpack list."""
        if watch.prefill != self._name:
            return msgspec.msgpack.encode(watch.tickets)
        with self._lock:
            known = {entry.offer.ticket for entry in self._open.values()} | self._pushes.keys()
        return msgspec.msgpack.encode([ticket for ticket in watch.tickets if ticket not in known])

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
        """Prefill has given up on it: whoever offers, or has just offered, is told."""
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


# The prefill engine's moves in a push: read what decode has, write what it lacks, give notice.


log = logging.getLogger(__name__)

_CONTROL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Move:
    """What has ended: decode's prefix was read, notice was taken, a failure was told, or a move went wrong."""

    push: Push
    what: Literal["read", "delivered", "told", "broken"]
    error: DisaggError | None = None
    #: Own blocks that a read may still fill: not to be used again.
    lost: tuple[int, ...] = ()


class KvPusher:
    """Each push's moves run in order, on its decode engine's lane, beside the engine's thread."""

    def __init__(
        self,
        transport: KvTransport,
        client: ControlClient,
        lanes: Lanes,
        *,
        timeout_seconds: float,
        on_finished: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._client = client
        self._lanes = lanes
        self._timeout = timeout_seconds
        self._on_finished = on_finished
        self._finished: queue.SimpleQueue[Move] = queue.SimpleQueue()
        self.cards = Cards(client, self._check)
        #: Writes that have ended. Used by tests and statistics.
        self.writes = 0

    def read(self, push: Push, first: int, local: list[int]) -> None:
        """Fetch decode's blocks from the `first` on into `local`."""
        self._lanes.submit(
            push.offer.endpoint, self._run, push, lambda: self._read(push, first, local), local
        )

    def write(self, push: Push, first: int, local: list[int]) -> None:
        """Put `local` into decode's blocks from the `first` on."""
        self._lanes.submit(push.offer.endpoint, self._run, push, lambda: self._write(push, first, local))

    def deliver(self, push: Push, notice: Notice) -> None:
        """After all writes. `bytes_moved` of the notice is filled in when they have ended."""
        self._lanes.submit(push.offer.endpoint, self._run, push, lambda: self._deliver(push, notice))

    def fail(self, push: Push, reason: str) -> None:
        """Nothing more is written; decode is told, if it can be."""
        push.close()
        self._lanes.submit(push.offer.endpoint, self._tell, push, reason)

    def take_finished(self) -> list[Move]:
        moves: list[Move] = []
        with contextlib.suppress(queue.Empty):
            while True:
                moves.append(self._finished.get_nowait())
        return moves

    # -- on the lane

    def _run(self, push: Push, move: Callable[[], None], filled: Sequence[int] = ()) -> None:
        """`filled`: blocks of this engine that the move writes into."""
        lost: tuple[int, ...] = ()
        with push.operation() as allowed:
            if not allowed:
                self._finish(Move(push, "broken", KvTransferError(_GIVEN_UP)))
                return
            try:
                move()
                return
            except ReadTimeoutError as error:
                reason: DisaggError = KvTransferError(str(error))
                lost = tuple(filled) if error.may_land_later else ()
                may_land_later = error.may_land_later
            except DisaggError as error:
                reason, may_land_later = error, False
            except Exception as error:
                log.exception("a KV push to %s failed unexpectedly", push.offer.decode)
                reason, may_land_later = KvTransferError(f"{type(error).__name__}: {error}"), False
            if may_land_later and not filled:
                push.never_stops()
            push.close()
        card = self.cards.drop(push.offer.endpoint)
        try:
            if card is not None and not may_land_later:
                self._transport.forget(card)
        except Exception:  # somebody waits for the end of this move
            log.exception("cleaning up after a KV push to %s failed", push.offer.decode)
        self._finish(Move(push, "broken", reason, lost))

    def _read(self, push: Push, first: int, local: list[int]) -> None:
        self._transport.read(*self._aim(push, first, local), self._timeout)
        # As with a lease: who holds the blocks says afterwards whether they were touched.
        if self._say(push, StillOffered(push.offer.ticket)) != b"held":
            raise KvTransferError(_GIVEN_UP)
        self._finish(Move(push, "read"))

    def _write(self, push: Push, first: int, local: list[int]) -> None:
        push.bytes_moved += self._transport.write(*self._aim(push, first, local), self._timeout)
        self.writes += 1

    def _deliver(self, push: Push, notice: Notice) -> None:
        notice = msgspec.structs.replace(notice, bytes_moved=push.bytes_moved)
        try:
            answer = self._say(push, notice)
        except KvTransferError:  # the connection may have been an old one
            answer = self._say(push, notice)
        if answer != b"taken":
            raise KvTransferError(_GIVEN_UP)
        push.close()
        self._finish(Move(push, "delivered"))

    def _tell(self, push: Push, reason: str) -> None:
        with contextlib.suppress(KvTransferError):
            self._say(push, Failure(push.offer.ticket, reason[:1000], push.stopped.is_set()))
        self._finish(Move(push, "told"))

    def _aim(self, push: Push, first: int, local: list[int]) -> tuple[PeerCard, np.ndarray, np.ndarray]:
        """Whose memory, which blocks there, and which here."""
        card = self.cards.of_peer(push.offer.endpoint, push.offer.decode)
        remote = push.offer.blocks[first : first + len(local)]
        if max(remote) >= card.num_blocks:
            raise HandoffRefusedError(
                f"the offer names block {max(remote)}; its decode worker has {card.num_blocks}"
            )
        return card, np.asarray(remote, np.int32), np.asarray(local, np.int32)

    def _say(self, push: Push, message: Notice | Failure | StillOffered) -> bytes:
        return self._client.say(push.offer.endpoint, message, _CONTROL_SECONDS)

    def _check(self, card: PeerCard) -> None:
        if card.transport != self._transport.name:
            raise HandoffRefusedError(
                f"decode takes KV by {card.transport}, prefill writes by {self._transport.name}; "
                "set the same cache_transceiver_config.backend on both"
            )

    def _finish(self, move: Move) -> None:
        self._finished.put(move)
        self._on_finished()


_GIVEN_UP = "the decode worker has given up on this request"
