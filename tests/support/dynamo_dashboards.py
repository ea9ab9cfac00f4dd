"""Prometheus queries of Dynamo's dashboards and Planner: metrics and label matchers, as PromQL selectors.

From disagg-dashboard.json and dynamo.json in dev/observability/grafana_dashboards/ and
dynamo/planner/monitoring/traffic_metrics.py of ai-dynamo/dynamo 1.6, without GPUs, containers, labels of Kubernetes
(`namespace`, `pod`), and error values of `error_type` and `status`.
"""

from __future__ import annotations

_DONE = ("sum", "count")
_HISTOGRAM = ("sum", "count", "bucket")


def _of(metric: str, parts: tuple[str, ...], matchers: str = "") -> list[str]:
    return [f"{metric}_{part}{{{matchers}}}" for part in parts]


_PREFILL = 'dynamo_component="prefill", dynamo_endpoint="generate"'
_BACKEND = 'dynamo_component="backend"'
_SECONDS = "dynamo_component_request_duration_seconds"

#: Workers' metrics, by role.
OF_ROLE = {
    "prefill": [*_of(_SECONDS, _HISTOGRAM, _PREFILL), f"dynamo_component_requests_total{{{_PREFILL}}}"],
    "backend": [
        *_of(_SECONDS, _DONE, f'{_BACKEND}, dynamo_endpoint="generate"'),
        *_of(_SECONDS, _DONE, _BACKEND),
        f"dynamo_component_requests_total{{{_BACKEND}}}",
    ],
}

#: Every worker's metrics; M is the model's name.
OF_WORKERS = [
    "dynamo_component_gpu_cache_usage_percent",
    "dynamo_component_total_blocks",
    *(
        f"dynamo_component_kvstats_{name}"
        for name in ("active_blocks", "total_blocks", "gpu_cache_usage_percent")
    ),
    'dynamo_component_requests_total{dynamo_endpoint="generate"}',
    'dynamo_component_requests_total{model="M"}',
    'dynamo_component_request_bytes_total{dynamo_endpoint="generate", model="M"}',
    'dynamo_component_response_bytes_total{dynamo_endpoint="generate", model="M"}',
    'dynamo_component_cancellation_total{model="M"}',
    *_of(_SECONDS, _HISTOGRAM, 'model="M"'),
]

_BY_MODEL = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_duration_seconds",
    "input_sequence_tokens",
    "output_sequence_tokens",
)
OF_FRONTEND = [
    'dynamo_frontend_requests_total{model="M", status="success"}',
    'dynamo_frontend_requests_started_total{model="M"}',
    'dynamo_frontend_active_requests{model="M"}',
    *(f'dynamo_frontend_stage_requests{{stage="{stage}"}}' for stage in ("preprocess", "route", "dispatch")),
    *(each for name in _BY_MODEL for each in _of(f"dynamo_frontend_{name}", _HISTOGRAM, 'model="M"')),
    *_of("dynamo_frontend_cached_tokens", _HISTOGRAM, 'model="M"'),
    "dynamo_frontend_worker_active_decode_blocks",
    "dynamo_frontend_worker_active_prefill_tokens",
    *_of("dynamo_component_router_kv_hit_rate", _HISTOGRAM),
    *(
        each
        for step in ("block_hashing", "indexer_find_matches", "seq_hashing", "scheduling", "total")
        for each in _of(f"dynamo_router_overhead_{step}_ms", _HISTOGRAM)
    ),
    'dynamo_component_kv_cache_events_applied{event_type="stored", status="ok"}',
]
