"""Pulls that took too long: their blocks can be used again once the read has ended, or its sender is dead."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.control import ControlClient
from trtllm_disagg.kv_transfer.doors import PeerGoneError
from trtllm_disagg.kv_transfer.lanes import Lanes

if TYPE_CHECKING:
    from trtllm_disagg.kv_transfer.exchange import Pull

_ASK_SECONDS = 0.5
_CONTROL_SECONDS = 5.0
#: The control channel closes first. By then an engine that closes has ended or been killed, and so have ranks of its
#: that were stopped, and what they had sent has arrived.
_GONE_SECONDS = 15.0


class LatePulls:
    """Asked after from time to time, each on its sender's lane."""

    def __init__(self, client: ControlClient, lanes: Lanes, on_ended: Callable[[], None]) -> None:
        self._client = client
        self._lanes = lanes
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._late: list[Pull] = []
        self._asking: set[int] = set()
        #: When a pull's sender was first missed, and never met since; by id(pull).
        self._gone_since: dict[int, float] = {}
        self._ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pull: Pull) -> None:
        """Its blocks are kept apart from now on."""
        with self._lock:
            self._late.append(pull)
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask_all, name="kv-late", daemon=True)
            self._thread.start()

    def take_ended(self) -> list[Pull]:
        """Nothing can be written into their blocks any more. Each is told once."""
        ended: list[Pull] = []
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _ask_all(self) -> None:
        while not self._closed.wait(_ASK_SECONDS):
            with self._lock:
                waiting = [pull for pull in self._late if id(pull) not in self._asking]
                self._asking |= {id(pull) for pull in waiting}
            for pull in waiting:
                self._lanes.submit(pull.handle.endpoint, self._ask, pull)

    def _ask(self, pull: Pull) -> None:
        has_ended = pull.has_ended() or self._is_sender_dead(pull)
        with self._lock:
            self._asking.discard(id(pull))
            if has_ended:
                self._gone_since.pop(id(pull), None)
                self._late.remove(pull)
        if has_ended:
            self._ended.put(pull)
            self._on_ended()

    def _is_sender_dead(self, pull: Pull) -> bool:
        """Nobody has listened where it did for a while: its process has ended, and the bytes that it sends with it."""
        try:
            self._client.card(pull.handle.endpoint, _CONTROL_SECONDS)
        except PeerGoneError:
            missed = self._gone_since.setdefault(id(pull), time.monotonic())
            return time.monotonic() - missed >= _GONE_SECONDS
        except KvTransferError:  # slow, or stopped
            pass
        self._gone_since.pop(id(pull), None)
        return False
