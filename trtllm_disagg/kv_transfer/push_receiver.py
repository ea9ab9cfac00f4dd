"""GENERATION_FIRST, the decode engine's end: blocks are offered, and a prefill engine writes into them.

Decode may give up at any moment. Its blocks are its own again only when the writer has said that it stopped, or is
known to be dead; a writer that says neither keeps them, and is asked again and again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError, OverloadedError
from trtllm_disagg.kv_transfer.access import PeerGoneError
from trtllm_disagg.kv_transfer.handle import UNREADABLE
from trtllm_disagg.kv_transfer.messages import (
    MAX_OFFER_SECONDS,
    Failure,
    Notice,
    Offer,
    StillOffered,
    Watch,
    Withdraw,
    new_ticket,
)
from trtllm_disagg.kv_transfer.peers import LateTransfer, Peers, as_disagg_error

_tickets = msgspec.msgpack.Decoder(list[bytes])


@dataclass(slots=True, kw_only=True, eq=False)
class Expected:
    """One request's KV on its way here, from a prefill engine that may not have begun."""

    endpoint: str
    request: int
    prompt: bytes
    blocks: list[int]
    num_known: int
    seconds: float
    ticket: bytes = field(default_factory=new_ticket)
    #: The prefill engine; empty as long as nothing was offered to it.
    prefill: str = ""
    notice: Notice | None = None
    error: DisaggError | None = None
    #: Prefill does not write into the blocks any more.
    stopped: bool = False


class PushReceiver:
    """An expectation leaves the table exactly once: by notice, by failure, or because it was given up."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        peers: Peers,
        *,
        on_news: Callable[[], None],
        on_busy: Callable[[], None],
    ) -> None:
        """`on_busy`: a peer may write here from now on."""
        self._name = name
        self._endpoint = endpoint
        self._peers = peers
        self._on_busy = on_busy
        self._on_news = on_news
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Expected] = {}
        self._closed = threading.Event()
        self._watching: set[str] = set()
        self._watcher = threading.Thread(target=self._watch_all, name="kv-watch", daemon=True)
        self._watcher.start()

    # -- the engine's thread

    def expect(self, expected: Expected) -> None:
        with self._lock:
            self._waiting[expected.ticket] = expected
        self._on_busy()
        self._peers.workers.submit(expected.endpoint, self._offer, expected)

    def give_up(self, expected: Expected) -> LateTransfer | None:
        """None when its blocks may be used again; else what may still be written into them."""
        with self._lock:
            self._waiting.pop(expected.ticket, None)
            if expected.stopped:
                return None
        late = LateTransfer(expected.endpoint, lambda: self._withdraw(expected))
        self._peers.late.add(late)
        return late

    def decline(self, endpoint: str, request: int) -> None:
        """Nothing will be offered for this request; best effort, prefill's wait ends by itself."""
        self._peers.workers.submit(endpoint, self._decline, endpoint, request)

    @property
    def is_busy(self) -> bool:
        """A peer may write here."""
        return bool(self._waiting or self._peers.late)

    def close(self) -> None:
        self._closed.set()
        self._watcher.join(timeout=5)

    # -- the control channel's threads

    def noticed(self, notice: Notice) -> bytes:
        return self._leave(notice.ticket, notice=notice, stopped=True)

    def failed(self, failure: Failure) -> bytes:
        error = KvTransferError(f"prefill: {failure.reason}")
        return self._leave(failure.ticket, error=error, stopped=failure.stopped)

    def still_offered(self, question: StillOffered) -> bytes:
        return b"held" if question.ticket in self._waiting else b"gone"

    def _leave(
        self, ticket: bytes, *, notice: Notice | None = None, error: DisaggError | None = None, stopped: bool
    ) -> bytes:
        with self._lock:
            expected = self._waiting.pop(ticket, None)
            if expected is None:
                return b"gone"
            expected.notice, expected.error, expected.stopped = notice, error, stopped
        self._on_news()
        return b"taken"

    # -- on the prefill engine's worker

    def _offer(self, expected: Expected) -> None:
        if expected.ticket not in self._waiting:
            return
        endpoint = expected.endpoint
        try:
            answer = self._say_offer(expected)
            if answer == b"stranger":  # restarted since its metadata was loaded
                self._peers.metadata.drop(endpoint)
                answer = self._say_offer(expected)
        except Exception as raised:
            error = as_disagg_error(raised, endpoint)
            is_lost = isinstance(error, KvTransferError)
            if is_lost:
                self._peers.metadata.drop(endpoint)
            # An offer may have been taken although its answer was lost.
            may_be_taken = is_lost and expected.prefill and not isinstance(error, PeerGoneError)
            self._leave(expected.ticket, error=error, stopped=not may_be_taken)
        else:
            if answer != b"ok":
                self._leave(expected.ticket, error=_refused(answer), stopped=True)

    def _say_offer(self, expected: Expected) -> bytes:
        expected.prefill = self._peers.metadata.of(expected.endpoint).sender
        return self._peers.say(expected.endpoint, self._offer_of(expected))

    def _offer_of(self, expected: Expected) -> Offer:
        return Offer(
            request=expected.request,
            ticket=expected.ticket,
            prefill=expected.prefill,
            decode=self._name,
            endpoint=self._endpoint,
            layout=self._peers.layout.fingerprint(),
            prompt=expected.prompt,
            blocks=expected.blocks,
            num_known=expected.num_known,
            seconds=min(expected.seconds, MAX_OFFER_SECONDS),
        )

    def _decline(self, endpoint: str, request: int) -> None:
        with contextlib.suppress(DisaggError):
            prefill = self._peers.metadata.of(endpoint).sender
            self._peers.say(endpoint, Withdraw(prefill, request, new_ticket()))

    def _withdraw(self, expected: Expected) -> bool:
        """True once prefill cannot write any more."""
        if not expected.prefill:  # given up before it was offered: prefill waits for nothing
            self._decline(expected.endpoint, expected.request)
            return True
        question = Withdraw(expected.prefill, expected.request, expected.ticket)
        try:
            return self._peers.say(expected.endpoint, question) == b"stopped"
        except PeerGoneError:
            return True
        except KvTransferError:
            return False

    # -- is the writer alive?

    def _watch_all(self) -> None:
        while not self._closed.wait(self._peers.timeouts.ask):
            with self._lock:
                waiting = [e for e in self._waiting.values() if e.prefill]
            for endpoint, prefill in {(e.endpoint, e.prefill) for e in waiting}:
                mine = [e.ticket for e in waiting if e.prefill == prefill and e.endpoint == endpoint]
                self._once(endpoint, self._watch, endpoint, prefill, mine)

    def _once(self, endpoint: str, work: Callable[..., None], *args: object) -> None:
        """On the peer's worker, unless the same work waits there already."""
        key = f"{work.__name__} {endpoint}"

        def run() -> None:
            self._watching.discard(key)
            work(*args)

        if key not in self._watching:
            self._watching.add(key)
            self._peers.workers.submit(endpoint, run)

    def _watch(self, endpoint: str, prefill: str, tickets: list[bytes]) -> None:
        try:
            lost = _tickets.decode(self._peers.say(endpoint, Watch(prefill, tickets)))
            reason = f"prefill worker {prefill} ended this request without a word"
        except PeerGoneError:
            lost, reason = tickets, f"prefill worker {prefill} is gone"
        except (KvTransferError, *UNREADABLE):
            return  # it may come back; every expectation has a deadline
        # Those that have ended while the question was on its way are not lost, and say nothing about their engine.
        left = [self._leave(ticket, error=KvTransferError(reason), stopped=True) for ticket in lost]
        if b"taken" in left:
            self._peers.metadata.drop(endpoint)


def _refused(answer: bytes) -> DisaggError:
    reason = answer.decode(errors="replace")[:100]
    if answer == b"full":
        return OverloadedError("the prefill worker has too many offers")
    if answer == b"left":
        return KvTransferError("the prefill worker has given up on this request")
    return HandoffRefusedError(f"the prefill worker does not take these blocks: {reason}")
