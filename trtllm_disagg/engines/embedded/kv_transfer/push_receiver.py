"""GENERATION_FIRST, the decode engine's end: blocks are offered, and a prefill engine writes into them.

Decode may give up at any moment. It uses its blocks again only when the writer has confirmed that it stopped, or is
known to be dead; until then the blocks stay with the writer, which is asked repeatedly.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from trtllm_disagg.engines.embedded.kv_transfer.control import PeerGoneError
from trtllm_disagg.engines.embedded.kv_transfer.messages import (
    Failure,
    Notice,
    Offer,
    Reply,
    StillOffered,
    Watch,
    Withdraw,
    new_ticket,
)
from trtllm_disagg.engines.embedded.kv_transfer.peers import LateTransfer, Peers, as_disagg_error
from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError, OverloadedError
from trtllm_disagg.wire.kv_handle import UNREADABLE

_REMEMBERED = 4096
_tickets = msgspec.msgpack.Decoder(list[bytes])
_REFUSALS = {
    Reply.UNFIT.value: "their layout, count or endpoint does not fit its engine",
    Reply.TAKEN.value: "this disagg_request_id was offered before",
    Reply.WITHDRAWN.value: "the decode worker has withdrawn them",
    Reply.BAD.value: "its engine takes no offers",
}


@dataclass(slots=True, kw_only=True, eq=False)
class Expected:
    """The KV of one request, expected from a prefill engine that may not have begun."""

    #: Prefill's control channel.
    endpoint: str
    offer: Offer
    #: When decode gives up, by time.monotonic().
    end: float = math.inf
    #: Prefill may know of these blocks.
    is_offered: bool = False
    notice: Notice | None = None
    error: DisaggError | None = None
    #: Prefill does not write into the blocks any more.
    stopped: bool = False


class PushReceiver:
    """The table of expectations. One leaves it exactly once: by a notice, by a failure, or when decode gives up."""

    def __init__(
        self,
        peers: Peers,
        *,
        on_news: Callable[[], None],
        on_busy: Callable[[], None],
    ) -> None:
        """`on_busy` is called when a peer may write here from now on."""
        self._peers = peers
        self._on_busy = on_busy
        self._on_news = on_news
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Expected] = {}
        #: Tickets of accepted notices: prefill sends one again when the answer was lost.
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
        """None when the blocks may be used again; else the transfer that may still write into them."""
        with self._lock:
            self._waiting.pop(expected.offer.ticket, None)
            if expected.stopped:
                return None
        # The offer may still be on its way: only behind it, on the peer's thread, is it known whether it was sent.
        late = LateTransfer(expected.endpoint, lambda: self._withdraw(expected))
        self._peers.late.add(late)
        return late

    def decline(self, endpoint: str, request: int) -> None:
        """Tell prefill that it gets no offer for this request; best effort, because prefill's wait has a deadline."""
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
                return Reply.TAKEN if notice is not None and ticket in self._accepted else Reply.GONE
            if notice is not None:
                self._accepted.append(ticket)
            expected.notice, expected.error, expected.stopped = notice, error, stopped
        self._on_news()
        return Reply.TAKEN

    # -- on the prefill engine's thread

    def _offer(self, expected: Expected) -> None:
        if expected.offer.ticket not in self._waiting:
            return
        endpoint = expected.endpoint
        try:
            self._peers.metadata.of(endpoint)  # which is refused where our KV does not fit
            expected.is_offered = True
            answer = self._peers.send(endpoint, expected.offer)
        except Exception as raised:
            error = as_disagg_error(raised, endpoint)
            is_lost = isinstance(error, KvTransferError)
            if is_lost:
                self._peers.metadata.drop(endpoint)
            # Prefill may have accepted an offer although its answer was lost.
            may_be_taken = is_lost and expected.is_offered and not isinstance(error, PeerGoneError)
            self._settle(expected.offer.ticket, error=error, stopped=not may_be_taken)
        else:
            if answer != Reply.OK:
                self._settle(expected.offer.ticket, error=_refused(answer), stopped=True)

    def _decline(self, endpoint: str, request: int) -> None:
        with contextlib.suppress(DisaggError):
            self._peers.send(endpoint, Withdraw(request, new_ticket()))

    def _withdraw(self, expected: Expected) -> bool:
        """True once prefill cannot write into the blocks any more."""
        if not expected.is_offered:  # given up before it was offered: prefill waits for nothing
            self._decline(expected.endpoint, expected.offer.request)
            return True
        question = Withdraw(expected.offer.request, expected.offer.ticket)
        try:
            return self._peers.send(expected.endpoint, question) == Reply.STOPPED
        except PeerGoneError:
            return True  # it wrote by system calls, and none outlives a process
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
        # Not known to have stopped: a withdrawal asks that first. Requests that ended while the question was on its way
        # do not show that their engine has lost any.
        replies = [self._settle(ticket, error=KvTransferError(reason), stopped=False) for ticket in lost]
        if Reply.TAKEN in replies:
            self._peers.metadata.drop(endpoint)


def _refused(answer: bytes) -> DisaggError:
    if answer == Reply.FULL:
        return OverloadedError("the prefill worker has too many offers")
    if answer == Reply.ABANDONED:
        return KvTransferError("the prefill worker has given up on this request")
    reason = _REFUSALS.get(answer) or answer.decode(errors="replace")[:100]
    return HandoffRefusedError(f"the prefill worker does not take these blocks: {reason}")
