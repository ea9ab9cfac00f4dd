"""The cards of peers: loaded at the first meeting, kept, and dropped when the peer is lost or restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.base import KvTransport, PeerCard
from trtllm_disagg.kv_transfer.control import ControlClient

_CONTROL_SECONDS = 5.0


class Cards:
    """By endpoint. A peer's card is asked for on that peer's lane only."""

    def __init__(self, client: ControlClient, check: Callable[[PeerCard], None]) -> None:
        """`check` raises a DisaggError for a peer whose KV does not fit ours."""
        self._client = client
        self._check = check
        self._cards: dict[str, PeerCard] = {}
        self.loads = 0

    def of(self, endpoint: str) -> PeerCard:
        """Whoever is, or was last seen, at this endpoint."""
        return self._cards.get(endpoint) or self._load(endpoint)

    def of_peer(self, endpoint: str, name: str) -> PeerCard:
        """Raises KvTransferError when somebody else is at the endpoint now."""
        card = self._cards.get(endpoint)
        if card is None or card.sender != name:
            card = self._load(endpoint)
        if card.sender != name:
            raise KvTransferError(f"the handoff is from {name}, but {card.sender} is at {endpoint} now")
        return card

    def drop(self, endpoint: str) -> PeerCard | None:
        return self._cards.pop(endpoint, None)

    def _load(self, endpoint: str) -> PeerCard:
        card = self._client.card(endpoint, _CONTROL_SECONDS)
        self._check(card)
        self.loads += 1
        self._cards[endpoint] = card
        return card


# Who talks to a peer does it on that peer's lane: a thread of its own, one thing at a time.


_MAX_LANES = 64


class Lanes:
    """A peer that stalls delays nobody else's transfers."""

    def __init__(self) -> None:
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, endpoint: str, work: Callable[..., None], *args: Any) -> None:
        """From any thread. Nothing happens after `close`."""
        with self._lock:
            if not self._closed:
                self._lane(endpoint).submit(work, *args)

    def close(self) -> None:
        """What has begun ends; what waits is dropped."""
        with self._lock:
            self._closed = True
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes.values():
            lane.shutdown(wait=True)

    def _lane(self, endpoint: str) -> ThreadPoolExecutor:
        """The peer's; the last one is shared by all that come when there are too many (restarts, forgeries)."""
        known = endpoint in self._lanes or len(self._lanes) < _MAX_LANES - 1
        key = endpoint if known else "others"
        if key not in self._lanes:
            self._lanes[key] = ThreadPoolExecutor(1, "kv-lane")
        return self._lanes[key]


# Peers connect, read and write through our agent, which runs no thread of its own: this one gives it time.


_BUSY_SECONDS = 0.001
_IDLE_SECONDS = 0.02


class Pump:
    """Fast while somebody is expected.

    Slowly otherwise, too: who reads learns only afterwards that its lease had ended, and a read that never ends
    costs the receiver the blocks that it reads into.
    """

    def __init__(self, transport: KvTransport, is_busy: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_busy = is_busy
        self._hurry = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-progress", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Somebody may come now."""
        self._hurry.set()

    def close(self) -> None:
        self._closed = True
        self._hurry.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed:
            self._hurry.wait(_IDLE_SECONDS)
            self._hurry.clear()
            self._progress_while_busy()

    def _progress_while_busy(self) -> None:
        while not self._closed:
            self._transport.progress()
            if not self._is_busy():
                return
            time.sleep(_BUSY_SECONDS)
