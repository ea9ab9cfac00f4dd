"""Holds what changes while a worker serves: settings, and observations of requests, engines and peers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trtllm_disagg.config.deciders import Occupancy
from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.errors import DisaggError
from trtllm_disagg.handlers.admission import Queued
from trtllm_disagg.handlers.cached_prefix import CachedPrefixes
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.drain import in_background
from trtllm_disagg.handlers.selection import Directory, StageInstance
from trtllm_disagg.handlers.trace import RequestSink

log = logging.getLogger(__name__)

#: Key in a worker's description.
KV_OCCUPANCY = "kv_occupancy"

#: Seconds between questions to an instance while requests come; seconds that its answer counts.
_REFRESH_SECONDS, _VALID_SECONDS = 0.25, 2.0
_ANSWER_SECONDS = 1.0
#: Of more instances only a sample is asked: it is enough for a mean, and each of a thousand workers asks.
_MAX_ASKED = 32


class OwnOccupancy:
    """This worker's occupancy (0 to 1) from its engine's statistics, averaged over attention-DP ranks; 0 before the
    engine's first step.
    """

    def __init__(self) -> None:
        self._ranks: dict[Any, float] = {}

    def update(self, stat: Mapping[str, Any]) -> None:
        """`stat`: one record of `get_stats_async`."""
        blocks = stat.get("kvCacheStats") or {}
        used, total = blocks.get("usedNumBlocks"), blocks.get("maxNumBlocks")
        if used is not None and total:
            self._ranks[stat.get("attentionDpRank")] = used / total

    def clear(self) -> None:
        """The engine is idle."""
        self._ranks.clear()

    @property
    def share(self) -> float:
        ranks = list(self._ranks.values())  # copied: the statistics thread may add a rank
        return sum(ranks) / len(ranks) if ranks else 0.0


#: The peers' occupancy (0 to 1); None while unknown. Never waits.
OtherOccupancy = Callable[[], Occupancy | None]


class StageOccupancy:
    """The mean occupancy of the peers that answered lately.

    `now` is an `OtherOccupancy`. It asks in the background, so the first decision after a pause finds None.
    """

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        #: By instance: (its share, when it answered).
        self._shares: dict[int, tuple[float, float]] = {}
        self._asked_at = -_REFRESH_SECONDS
        self._is_asking = False

    def now(self) -> Occupancy | None:
        now = self._clock()
        if not self._is_asking and now - self._asked_at >= _REFRESH_SECONDS:
            self._is_asking, self._asked_at = True, now
            in_background(self._ask_all(), "query of the peers' occupancy")
        there = set(self._directory.instance_ids())
        known = [
            (share, now - at)
            for instance_id, (share, at) in self._shares.items()
            if instance_id in there and now - at <= _VALID_SECONDS
        ]
        if not known:
            return None
        return Occupancy(sum(share for share, _ in known) / len(known), max(age for _, age in known))

    async def _ask_all(self) -> None:
        try:
            there = self._directory.instance_ids()
            self._shares = {each: share for each, share in self._shares.items() if each in there}
            asked = random.sample([*there], min(len(there), _MAX_ASKED))
            await asyncio.gather(*(self._ask(self._directory.instance(each)) for each in asked))
        finally:
            self._is_asking = False

    async def _ask(self, instance: StageInstance) -> None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                description: object = await instance.describe()
        except (DisaggError, TimeoutError) as error:
            # Its last answer expires soon, and the next request to it fails with the reason.
            log.debug("instance %x did not report its occupancy: %s", instance.instance_id, error)
            return
        share = description.get(KV_OCCUPANCY) if isinstance(description, dict) else None
        if isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1:
            self._shares[instance.instance_id] = float(share), self._clock()


@dataclass(frozen=True, slots=True)
class LiveState:
    """A serving worker's settings, changed by a command, and observations."""

    strategy: Live[str]
    thresholds: Live[Thresholds]
    cached: CachedPrefixes
    breaker: CircuitBreaker
    #: Called for every request that ends.
    sinks: list[RequestSink] = field(default_factory=list)
    queued: Queued = field(default_factory=Queued)
    occupancy: OwnOccupancy = field(default_factory=OwnOccupancy)
    other_occupancy: OtherOccupancy = lambda: None

    @classmethod
    def of(
        cls, config: WorkerConfig, block_size: int, other_occupancy: OtherOccupancy = lambda: None
    ) -> LiveState:
        """`block_size` in tokens."""
        return cls(
            Live(config.strategy),
            Live(Thresholds.of(config)),
            CachedPrefixes(block_size),
            CircuitBreaker(config.breaker_failures, config.breaker_seconds),
            other_occupancy=other_occupancy,
        )

    def in_another_role(self, config: WorkerConfig, other_occupancy: OtherOccupancy) -> LiveState:
        """The same settings and cache, without observations of requests and peers."""
        breaker = CircuitBreaker(config.breaker_failures, config.breaker_seconds)
        return LiveState(
            self.strategy, self.thresholds, self.cached, breaker, other_occupancy=other_occupancy
        )

    def set_thresholds(self, values: Mapping[str, Any], source: str) -> list[str]:
        """Set thresholds and return the differences as texts. On ConfigError nothing has changed."""
        old = self.thresholds.value
        new = old.changed(values, source)
        differences = old.differences(new)
        if differences:
            self.thresholds.value = new
            log.info("thresholds changed by %s: %s", source, ", ".join(differences))
        return differences
