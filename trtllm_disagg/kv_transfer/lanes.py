"""Who talks to a peer does it on that peer's lane: a thread of its own, one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
