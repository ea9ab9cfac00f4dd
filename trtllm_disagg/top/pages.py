"""The /metrics pages of workers and frontends, as far as `top` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from trtllm_disagg.top.snapshot import Frontend, Load

#: Field of Load -> the metric; the labels tell ranks, endpoints and reasons apart, whose sum it is.
_OF_WORKER = {
    "batch": "trtllm_disagg_requests_active",
    "queued": "trtllm_disagg_queued_requests",
    "kv_blocks": "dynamo_component_kvstats_active_blocks",
    "kv_blocks_total": "dynamo_component_kvstats_total_blocks",
    "handoffs_held": "trtllm_disagg_handoffs_held",
    "breakers_open": "trtllm_disagg_breakers_open",
    "prefill_tokens": "trtllm_disagg_prefill_tokens_total",
    "decode_tokens": "trtllm_disagg_decode_tokens_total",
    "requests_shed": "trtllm_disagg_requests_shed_total",
}
_REQUESTS = "trtllm_disagg_requests_total"
_RUNNING = "dynamo_frontend_inflight_requests"
_WAITING = "dynamo_frontend_queued_requests"
_DONE = "dynamo_frontend_requests_total"
_TTFT = "dynamo_frontend_time_to_first_token_seconds"
_ITL = "dynamo_frontend_inter_token_latency_seconds"

Samples = Mapping[str, list[Sample]]


def samples_of(page: str) -> Samples:
    """By name; empty for what is no such page."""
    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
    except ValueError:
        return {}
    return found


def load_of(page: str) -> Load:
    samples = samples_of(page)
    ended = samples.get(_REQUESTS)
    fallbacks = None if ended is None else [each for each in ended if each.labels.get("fallback") != "none"]
    return Load(
        **{name: _whole(samples.get(metric)) for name, metric in _OF_WORKER.items()},
        fallbacks=_whole(fallbacks),
    )


def frontend_of(page: str) -> Frontend:
    samples = samples_of(page)
    return Frontend(
        running=_whole(samples.get(_RUNNING)),
        waiting=_whole(samples.get(_WAITING)),
        requests=_whole(samples.get(_DONE)),
        ttft=_buckets(samples, _TTFT),
        ttft_sum=_sum(samples.get(f"{_TTFT}_sum", ())),
        itl=_buckets(samples, _ITL),
        itl_sum=_sum(samples.get(f"{_ITL}_sum", ())),
    )


def _whole(samples: Iterable[Sample] | None) -> int | None:
    return None if samples is None else int(_sum(samples))


def _sum(samples: Iterable[Sample]) -> float:
    return sum((sample.value for sample in samples), 0.0)


def _buckets(samples: Samples, metric: str) -> tuple[tuple[float, float], ...]:
    """Of all models together."""
    counts: dict[float, float] = {}
    for sample in samples.get(f"{metric}_bucket", ()):
        bound = float(sample.labels["le"])
        counts[bound] = counts.get(bound, 0.0) + sample.value
    return tuple(sorted(counts.items()))
