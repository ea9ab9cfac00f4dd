"""The prefill engine's side of offers: which there are, and when nothing can be written any more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from trtllm_disagg.kv_transfer.endpoint import is_endpoint
from trtllm_disagg.kv_transfer.offer import Offer, Watch, Withdraw

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
