"""What the engine measured of a request (`--publish-metrics`), told with the answer and on /metrics."""

from __future__ import annotations

from typing import Any

from trtllm_disagg.types import Journey

KV_TRANSFER_MS = "kv_transfer_ms"
KV_TRANSFER_BYTES = "kv_transfer_bytes"


def tell_transfer(journey: Journey, result: Any) -> None:
    """How long the request's KV was on its way here, and how much of it came. `result` is a finished RequestOutput."""
    measured = result.outputs[0].request_perf_metrics
    timing = measured.timing_metrics if measured is not None else None
    if timing is None:
        return
    seconds = (timing.kv_cache_transfer_end - timing.kv_cache_transfer_start).total_seconds()
    if seconds > 0:
        journey.facts[KV_TRANSFER_MS] = round(seconds * 1000, 3)
        journey.facts[KV_TRANSFER_BYTES] = timing.kv_cache_size
