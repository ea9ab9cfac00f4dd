"""Counts the handoffs with KV that may still be read, for engines that do not count them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trtllm_disagg.types import GenerateRequest

#: A step's statistics arrive within this time.
_DELAY_SECONDS = 1.0
#: A handoff is forgotten after this time, even under a longer lease.
_LONGEST_SECONDS = 600.0
#: Handoffs between two removals of expired ones: most end in no other way.
_BETWEEN_REMOVALS = 1024
#: A drain begins within this share of the lease, to have time to fetch.
_DRAINED_SHARE = 0.75
_DEFAULT_LEASE_MS = 60_000


class HandoffsHeld:
    """A handoff ends when decode is known to have its KV, when later statistics show no KV in the engine, or with its
    lease. Missing statistics do not mean no KV.
    """

    def __init__(self, lease_seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_seconds = min(lease_seconds, _LONGEST_SECONDS)
        self._drain_seconds = lease_seconds * _DRAINED_SHARE
        self._clock = clock
        self._ids = itertools.count()
        #: Number of a handoff -> when it was made.
        self._made: dict[int, float] = {}
        #: Rank -> whether its newest record shows no used KV.
        self._holds_none: dict[Any, bool] = {}
        #: When the newest record came, if no rank holds KV.
        self._quiet_since: float | None = None

    def may_be_drained(self, request: GenerateRequest) -> bool:
        """False near the lease's end: a decode that finds no KV waits for its timeout, or for ever."""
        made_at = request.kv_made_at
        return made_at is None or self._clock() - made_at < self._drain_seconds

    def hold(self) -> Callable[[], None]:
        """Count a handoff. Returns an idempotent function that ends it."""
        number = next(self._ids)
        if number % _BETWEEN_REMOVALS == 0:
            self._end_expired()
        self._made[number] = self._clock()
        return partial(self._end, number)

    def count(self) -> int:
        self._end_expired()
        return len(self._made)

    def oldest_seconds(self) -> float:
        """Age of the oldest handoff; 0 without any."""
        self._end_expired()
        made = list(self._made.values())
        return max(0.0, self._clock() - min(made)) if made else 0.0

    @property
    def has_statistics(self) -> bool:
        return bool(self._holds_none)

    def update(self, stat: Mapping[str, Any]) -> None:
        """Read a record of `get_stats_async`; every attention-DP rank sends its own. Thread-safe."""
        self._holds_none[stat.get("attentionDpRank")] = _holds_none(stat)
        if not all(list(self._holds_none.values())):
            self._quiet_since = None
            return
        self._quiet_since = self._clock()
        self._end_before(self._quiet_since - _DELAY_SECONDS)

    def _end_expired(self) -> None:
        now, quiet_since = self._clock(), self._quiet_since
        self._end_before(now - self.lease_seconds)
        if quiet_since is not None and now - quiet_since >= _DELAY_SECONDS:
            # The record of a step after a handoff made before `quiet_since` would be here by now.
            self._end_before(quiet_since)

    def _end(self, number: int) -> None:
        self._made.pop(number, None)

    def _end_before(self, when: float) -> None:
        for number, made in list(self._made.items()):
            if made <= when:
                self._end(number)


def lease_seconds_of(args: Mapping[str, Any]) -> float:
    """Seconds that the engine keeps unfetched KV; infinity if kv_transfer_timeout_ms is None."""
    transceiver = args.get("cache_transceiver_config") or {}
    milliseconds = transceiver.get("kv_transfer_timeout_ms", _DEFAULT_LEASE_MS)
    return math.inf if milliseconds is None else milliseconds / 1000


def _holds_none(stat: Mapping[str, Any]) -> bool:
    """Requires zero used blocks too: TensorRT-LLM's requests with unread KV are not active. A block that the engine
    keeps for itself can only make handoffs appear to last longer.
    """
    active = stat.get("numActiveRequests", 1) + stat.get("numQueuedRequests", 0)
    return bool(active == 0 and (stat.get("kvCacheStats") or {}).get("usedNumBlocks") == 0)
