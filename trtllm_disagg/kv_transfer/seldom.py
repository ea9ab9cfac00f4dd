"""Warnings of what a stranger can repeat as often as it likes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_SECONDS = 60.0


class Seldom:
    """Thread-safe. One warning a minute of each kind, with the number of those that were left out."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        #: By message: when it may be said again, and how often it was not.
        self._kinds: dict[str, tuple[float, int]] = {}

    def __call__(self, message: str, *details: object) -> None:
        with self._lock:
            due, left_out = self._kinds.get(message, (0.0, 0))
            now = self._clock()
            is_due = now >= due
            self._kinds[message] = (now + _SECONDS, 0) if is_due else (due, left_out + 1)
        if is_due:
            more = f" (and {left_out} more of these in the last minute)" if left_out else ""
            self._log.warning(message + "%s", *details, more)
