"""KV of finished prefills that another worker may still read, as far as this worker can know."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

#: A statistic may be as old as its way here.
_OLD_SECONDS = 1.0


class HandoffsHeld:
    """For engines that do not count them. A handoff ends when decode is known to have its KV, when the engine is seen
    idle after it, or with its lease. That nothing is known of the engine does not mean that it is idle.
    """

    def __init__(self, lease_seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._ids = itertools.count()
        #: When each was made.
        self._made: dict[int, float] = {}
        self._is_idle: dict[Any, bool] = {}

    def hold(self) -> Callable[[], None]:
        """Ends it; may be called more than once."""
        number = next(self._ids)
        self._made[number] = self._clock()
        return partial(self._end, number)

    def count(self) -> int:
        self._end_before(self._clock() - self._lease_seconds)
        return len(self._made)

    def oldest_seconds(self) -> float:
        """For how long it has been held; 0 when there is none."""
        made = list(self._made.values())
        return max(0.0, self._clock() - min(made)) if made else 0.0

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`; every rank of attention DP sends its own. From any thread."""
        num_active = stat.get("numActiveRequests", 1) + stat.get("numQueuedRequests", 0)
        self._is_idle[stat.get("attentionDpRank")] = num_active == 0
        if all(list(self._is_idle.values())):
            self._end_before(self._clock() - _OLD_SECONDS)

    def _end(self, number: int) -> None:
        self._made.pop(number, None)

    def _end_before(self, when: float) -> None:
        for number, made in list(self._made.items()):
            if made <= when:
                self._end(number)
