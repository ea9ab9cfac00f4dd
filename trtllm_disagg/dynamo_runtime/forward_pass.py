"""What each step of the engine did, and what waits for one, for Dynamo's Planner: its forward-pass metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

log = logging.getLogger(__name__)

#: Dynamo's argument -> the statistics that add up to it, as upstream's worker maps them. TensorRT-LLM has all of them
#: since its PR 13199. Work that is paused waits as work that is queued does.
_SOURCES: Mapping[str, tuple[str, ...]] = {
    "scheduled_num_prefill_requests": ("numContextRequests",),
    "scheduled_sum_prefill_tokens": ("numCtxTokens",),
    "scheduled_sum_prefill_kv_tokens": ("numCtxKvTokens",),
    "scheduled_num_decode_requests": ("numGenRequests",),
    "scheduled_sum_decode_kv_tokens": ("numGenKvTokens",),
    "queued_num_prefill_requests": ("numQueuedContextRequests",),
    "queued_sum_prefill_tokens": ("numQueuedCtxTokens",),
    "queued_num_decode_requests": ("numPausedRequests", "numQueuedGenRequests"),
    "queued_sum_decode_kv_tokens": ("numPausedKvTokens", "numQueuedGenKvTokens"),
}
NEEDED = frozenset(name for names in _SOURCES.values() for name in names)


class Steps(Protocol):
    """Dynamo's FpmDirectPublisher, as far as we use it. It says by itself, each second, that a worker is idle."""

    def publish(self, **values: float) -> None: ...

    def shutdown(self) -> None: ...


class NullSteps:
    def publish(self, **values: float) -> None:
        """Nowhere to publish."""

    def shutdown(self) -> None:
        """Nothing to end."""


class ForwardPassMetrics:
    """A sink of the engine's statistics."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def start(self) -> None:
        """It is told by `update`."""

    async def stop(self) -> None:
        self._end()

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`. One that lacks numbers ends this: in their place zeros would be published,
        by which the Planner takes a busy worker for an idle one.
        """
        batch = stat.get("inflightBatchingStats") or {}
        if missing := NEEDED - batch.keys():
            if not isinstance(self._steps, NullSteps):
                lacks = ", ".join(sorted(missing))
                log.warning("no forward-pass metrics: the engine's statistics lack %s", lacks)
                self._end()
            return
        values = {name: sum(int(batch[source]) for source in sources) for name, sources in _SOURCES.items()}
        seconds = float(stat.get("iterLatencyMS") or 0.0) / 1000
        self._steps.publish(dp_rank=stat.get("attentionDpRank") or 0, **values, wall_time_secs=seconds)

    def _end(self) -> None:
        steps, self._steps = self._steps, NullSteps()
        steps.shutdown()
