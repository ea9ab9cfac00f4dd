"""The engine's statistics -> the router's load, and the worker's /metrics. The only reader of that stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trtllm_disagg.publisher.base import PollingPublisher

_WAIT_SECONDS = 2.0


class LoadSink(Protocol):
    """Dynamo's WorkerMetricsPublisher, as far as we use it."""

    def publish(
        self, dp_rank: int | None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None
    ) -> None: ...


class StatsSink(Protocol):
    def update(self, stat: Mapping[str, Any]) -> None: ...


class StatsForwarder(PollingPublisher):
    """Needs enable_iter_perf_stats. Of what came together, the router gets the newest and the metrics all."""

    def __init__(self, llm: Any, load: LoadSink, metrics: StatsSink) -> None:
        super().__init__("engine-stats")
        self._llm = llm
        self._load = load
        self._metrics = metrics

    async def start(self) -> None:
        # The engine has no statistics before its first step, but the router asks.
        self._load.publish(None, kv_used_blocks=0)
        await super().start()

    async def poll(self) -> None:
        newest: dict[int | None, int] = {}
        async for stat in self._llm.get_stats_async(timeout=_WAIT_SECONDS):
            self._metrics.update(stat)
            used = (stat.get("kvCacheStats") or {}).get("usedNumBlocks", 0)
            newest[stat.get("attentionDpRank")] = used
        for rank, used in newest.items():
            self._load.publish(rank, kv_used_blocks=used)
