"""A request's times in TensorRT-LLM's form: `request_perf_metrics` of an output, `metrics_dict` and
`time_breakdown_metrics` of a result.

Source: TensorRT-LLM's RequestPerfMetrics, MetricNames and their clients in Dynamo.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

from trtllm_disagg.engines.embedded.ipc.messages import Measured

#: The one key of `metrics_dict` outside MetricNames.
FINISHED_REASON = "finished_reason"


class MetricNames(Enum):
    """Keys of `metrics_dict`; values in seconds, except the number of tokens."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    REQUEST_QUEUE_TIME = "request_queue_time"
    PREFILL_TIME = "prefill_time"
    DECODE_TIME = "decode_time"
    INFERENCE_TIME = "inference_time"
    GENERATION_TOKENS = "generation_tokens"


@dataclass(slots=True)
class TimingMetrics:
    """Times on this machine's monotonic clock; zero for what did not happen."""

    arrival_time: timedelta = timedelta()
    #: generation_only: when its KV had arrived.
    first_scheduled_time: timedelta = timedelta()
    first_token_time: timedelta = timedelta()
    last_token_time: timedelta = timedelta()
    #: KV transfer to this engine, counted from its request (with GENERATION_FIRST: before prefill).
    kv_cache_transfer_start: timedelta = timedelta()
    kv_cache_transfer_end: timedelta = timedelta()
    #: Received bytes.
    kv_cache_size: int = 0


@dataclass(slots=True)
class KvCacheMetrics:
    """Number of blocks at admission."""

    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0


@dataclass(slots=True)
class RequestPerfMetrics:
    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)


def request_perf_metrics(measured: Measured) -> RequestPerfMetrics:
    return RequestPerfMetrics(
        TimingMetrics(
            arrival_time=timedelta(seconds=measured.arrival),
            first_scheduled_time=timedelta(seconds=measured.first_scheduled),
            first_token_time=timedelta(seconds=measured.first_token),
            last_token_time=timedelta(seconds=measured.last_token),
            kv_cache_transfer_start=timedelta(seconds=measured.transfer_start),
            kv_cache_transfer_end=timedelta(seconds=measured.transfer_end),
            kv_cache_size=measured.transfer_bytes,
        ),
        KvCacheMetrics(
            num_total_allocated_blocks=measured.admission.allocated,
            num_new_allocated_blocks=measured.admission.allocated,
            num_reused_blocks=measured.admission.reused,
            num_missed_blocks=measured.admission.missed,
        ),
    )


def time_breakdown(measured: Measured) -> dict[str, list[dict[str, float]]]:
    """`time_breakdown_metrics` of a result: the start of each step of its prompt, and the end of the last. With images
    also `encode_metrics`, of our own: when the first one's encoding began, and the last one's ended.
    """
    chunks = [{"forward_start_time": began} for began in measured.chunks]
    if chunks and measured.first_token:
        chunks[-1]["token_time"] = measured.first_token
    breakdown = {"ctx_chunk_metrics": chunks}
    if times := measured.encoding:
        breakdown["encode_metrics"] = [{"encode_start_time": times[0], "encode_end_time": times[-1]}]
    return breakdown


def metrics_dict(
    measured: Measured, finish_reason: str, num_tokens: int, *, only_choice: bool
) -> dict[Any, Any]:
    """Keys: MetricNames and FINISHED_REASON. Omits what did not happen and, with several choices, per-choice counts."""
    scheduled, first, last = measured.first_scheduled, measured.first_token, measured.last_token
    spans = {
        MetricNames.TTFT: (measured.arrival, first),
        MetricNames.E2E: (measured.arrival, last),
        MetricNames.REQUEST_QUEUE_TIME: (measured.arrival, scheduled),
        MetricNames.PREFILL_TIME: (scheduled, first),
        MetricNames.DECODE_TIME: (first, last),
        MetricNames.INFERENCE_TIME: (scheduled, last),
    }
    metrics: dict[Any, Any] = {FINISHED_REASON: finish_reason}
    metrics |= {name: end - begin for name, (begin, end) in spans.items() if begin and end > begin}
    if only_choice and num_tokens:
        metrics[MetricNames.GENERATION_TOKENS] = num_tokens
        if num_tokens > 1 and last > first:
            metrics[MetricNames.TPOT] = (last - first) / (num_tokens - 1)
    return metrics
