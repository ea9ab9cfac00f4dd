"""A log for events that strangers, or many requests, can cause."""

from __future__ import annotations

import logging
import threading
import time

_WARNING_SECONDS = 60.0


class RateLimitedLog:
    """One warning a minute for each message, with the number of suppressed ones. Thread-safe."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        #: By message: when it may be logged again, and how often it was suppressed.
        self._kinds: dict[str, tuple[float, int]] = {}

    def __call__(self, message: str, *details: object) -> None:
        with self._lock:
            due, left_out = self._kinds.get(message, (0.0, 0))
            now = time.monotonic()
            is_due = now >= due
            self._kinds[message] = (now + _WARNING_SECONDS, 0) if is_due else (due, left_out + 1)
        if is_due:
            more = f" (and {left_out} more of these in the last minute)" if left_out else ""
            self._log.warning(message + "%s", *details, more)
