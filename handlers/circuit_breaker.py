"""Skips peers that fail again and again: a circuit breaker for each instance."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum

log = logging.getLogger(__name__)


class Sign(Enum):
    """What an instance fails or succeeds in. A prefill worker that answers may still fail to deliver KV."""

    ANSWERS = "answers"
    KV_ARRIVES = "kv_arrives"


class CircuitBreaker:
    """Skips an instance for `seconds` after `limit` failures of one sign in a row, and after each further one."""

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._failures: dict[tuple[int, Sign], int] = {}
        self._open_until: dict[int, float] = {}
        self.times_opened = 0

    def open(self) -> frozenset[int]:
        """The instances to skip now. Callable from any thread."""
        if not self._open_until:
            return frozenset()
        now = self._clock()
        return frozenset(i for i, until in list(self._open_until.items()) if now < until)

    def failed(self, instance_id: int, sign: Sign = Sign.ANSWERS) -> None:
        count = self._failures[instance_id, sign] = self._failures.get((instance_id, sign), 0) + 1
        if count >= self._limit:
            log.warning(
                "instance %x failed %d times in a row: skipped for %g s", instance_id, count, self._seconds
            )
            self._open_until[instance_id] = self._clock() + self._seconds
            self.times_opened += 1

    def succeeded(self, instance_id: int, sign: Sign = Sign.ANSWERS) -> None:
        if not self._failures:
            return
        self._failures.pop((instance_id, sign), None)
        if all(self._failures.get((instance_id, each), 0) < self._limit for each in Sign):
            self._open_until.pop(instance_id, None)
