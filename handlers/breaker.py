"""A circuit breaker for each instance of the other stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Breaker:
    """An instance that failed several times in a row is left alone for a while; then one failure more is enough."""

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._seconds = seconds
        self._clock = clock
        self._failures: dict[int, int] = {}
        self._open_until: dict[int, float] = {}

    def open(self) -> frozenset[int]:
        """Instances that are to be left alone now."""
        now = self._clock()
        return frozenset(i for i, until in self._open_until.items() if now < until)

    def failed(self, instance_id: int) -> None:
        count = self._failures[instance_id] = self._failures.get(instance_id, 0) + 1
        if count >= self._limit:
            log.warning(
                "instance %x failed %d times in a row: left alone for %g s", instance_id, count, self._seconds
            )
            self._open_until[instance_id] = self._clock() + self._seconds

    def succeeded(self, instance_id: int) -> None:
        self._failures.pop(instance_id, None)
        self._open_until.pop(instance_id, None)
