"""What waits in the prefill queue, as gauges. Every worker of it shows the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtllm_disagg.publisher.metrics import PREFIX


class QueueState(Protocol):
    def depth(self) -> int: ...

    def age(self) -> float: ...


class QueueMetrics(Collector):
    def __init__(self, queue: QueueState) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            PREFIX + "prefill_queue_depth",
            "Prefills in the queue that no worker has begun",
            value=self._queue.depth(),
        )
        yield GaugeMetricFamily(
            PREFIX + "prefill_queue_age_seconds",
            "For how long the oldest of them has waited",
            value=self._queue.age(),
        )
