"""The engine's statistics -> the router's load, and the worker's /metrics. The only reader of that stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

_WAIT_SECONDS = 2.0
_PAUSE_SECONDS = 0.01


class LoadSink(Protocol):
    """Dynamo's WorkerMetricsPublisher, as far as we use it."""

    def publish(
        self, dp_rank: int | None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None
    ) -> None: ...


class StatsSink(Protocol):
    def update(self, stat: Mapping[str, Any]) -> None: ...


class StatsForwarder:
    """Needs enable_iter_perf_stats. Of what came together, the router gets the newest and the metrics all."""

    def __init__(self, llm: Any, load: LoadSink, metrics: StatsSink) -> None:
        self._llm = llm
        self._load = load
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._load.publish(None, kv_used_blocks=0)
        self._task = asyncio.create_task(self._run(), name="engine-stats")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            newest: dict[int | None, int] = {}
            async for stat in self._llm.get_stats_async(timeout=_WAIT_SECONDS):
                self._metrics.update(stat)
                used = (stat.get("kvCacheStats") or {}).get("usedNumBlocks", 0)
                newest[stat.get("attentionDpRank")] = used
            for rank, used in newest.items():
                self._load.publish(rank, kv_used_blocks=used)
            await asyncio.sleep(_PAUSE_SECONDS)
