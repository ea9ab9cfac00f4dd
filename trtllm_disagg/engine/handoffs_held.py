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
    to hold none after it, or with its lease. That nothing is known of the engine does not mean that it holds none.
    """

    def __init__(self, lease_seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._ids = itertools.count()
        #: When each was made.
        self._made: dict[int, float] = {}
        self._holds_none: dict[Any, bool] = {}
        #: When the newest statistic came, if no rank holds any.
        self._quiet_since: float | None = None

    def hold(self) -> Callable[[], None]:
        """Ends it; may be called more than once."""
        number = next(self._ids)
        self._made[number] = self._clock()
        return partial(self._end, number)

    def count(self) -> int:
        self._end_what_is_over()
        return len(self._made)

    def oldest_seconds(self) -> float:
        """For how long it has been held; 0 when there is none."""
        self._end_what_is_over()
        made = list(self._made.values())
        return max(0.0, self._clock() - min(made)) if made else 0.0

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`; every rank of attention DP sends its own. From any thread."""
        self._holds_none[stat.get("attentionDpRank")] = _holds_none(stat)
        if not all(list(self._holds_none.values())):
            self._quiet_since = None
            return
        self._quiet_since = self._clock()
        self._end_before(self._quiet_since - _OLD_SECONDS)

    def _end_what_is_over(self) -> None:
        now, quiet_since = self._clock(), self._quiet_since
        self._end_before(now - self.lease_seconds)
        if quiet_since is not None and now - quiet_since >= _OLD_SECONDS:
            # The step of a handoff that the statistic did not know would have been heard of by now.
            self._end_before(quiet_since)

    def _end(self, number: int) -> None:
        self._made.pop(number, None)

    def _end_before(self, when: float) -> None:
        for number, made in list(self._made.items()):
            if made <= when:
                self._end(number)


def _holds_none(stat: Mapping[str, Any]) -> bool:
    """TensorRT-LLM's active requests are without those with KV still to be read, so no block may be in use. One
    that it keeps for itself makes handoffs look longer, never shorter.
    """
    active = stat.get("numActiveRequests", 1) + stat.get("numQueuedRequests", 0)
    return bool(active == 0 and (stat.get("kvCacheStats") or {}).get("usedNumBlocks") == 0)
