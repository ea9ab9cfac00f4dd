"""Writes docs/reference/metrics.md from the metrics: `python -m scripts.metrics_page`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import (
    DynamoMetrics,
    EngineMetrics,
    LoadMetrics,
    QueueMetrics,
    StepMetrics,
    registry_of,
)
from trtllm_disagg.dynamo_runtime.request_metrics import (
    EngineRequestMetrics,
    FrontendRequests,
    RequestMetrics,
)
from trtllm_disagg.engine.handoffs_held import HandoffsHeld
from trtllm_disagg.engine.trtllm_version import STEP_GAUGES
from trtllm_disagg.handlers.admission import Queued
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.trace import RequestEnd
from trtllm_disagg.wire.bodies import decode_request

OUT = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
EVERYWHERE = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id", "model", "model_name")
HEAD = """# Metrics

A worker with `--publish-metrics` and `DYN_SYSTEM_PORT=PORT` (at most 32767) shows these at `http://WORKER:PORT/metrics`,
beside the metrics of Dynamo's runtime (`dynamo_component_*` of endpoints, `dynamo_work_handler_*`). As on
`dynamo.trtllm`, `dynamo_component_errors_total` counts each answer that its reader did not read to the end
(`publish_response`, here also `publish_final`): a frontend at a stop string, or a calling worker. A histogram has
`_bucket`, `_sum` and `_count`. What to do with them: [dashboards and alerts](../how-to/alerts.md).

Every metric has the labels `dynamo_namespace`, `dynamo_component` (`prefill`, or `backend` for decode and agg),
`dynamo_endpoint`, `worker_id`, `model` and `model_name`, those of TensorRT-LLM also `engine_type`. A label has a
bounded number of values; further ones become `other`. `scripts/metrics_page.py` makes this page.
"""

#: Label -> the meaning of its values, under "Requests".
LABELS = {
    "`strategy`": (
        "what ran: `prefill_first`, `decode_first`, `agg`, `router`, or `local` (this worker ran both phases alone)"
    ),
    "`reason`": (
        "why: the [decider](deciders.md)'s reason (`always`, `short`, `long`, `queue_full`, ...), `annotation` if the "
        "request asked for it, `default` under `agg` and `router`. `auto` puts `auto_` before it, and has "
        "`auto_no_peer` (no healthy peer) and `auto_busy` (this worker's batch is full, so the other order ran). "
        "`nothing_left`: a dead worker had sent all of the answer but its end"
    ),
    "`fallback`, `to`": (
        "what continued a failed request: `other_instance` (another peer), `direct` (a prefill worker without the "
        "queue), `local` (this worker alone), `other_stage` (a worker of the other role, alone). `fallback` is the "
        "last step, or `none`"
    ),
    "`cause`": "the [error](errors.md) that failed it",
    "`source`": (
        "what made the first token: `own_engine`, `prefill_worker`, `decode_worker` (generation_first), or "
        "`other_first_stage`, which got the request from this worker"
    ),
    "`phase`": (
        "`whole`: a client's request; `relayed`: one that another first stage passed on; `prefill`, `decode`: one "
        "phase for another worker. Under `router` prefill workers count `prefill`"
    ),
    "`point`": (
        "what the client had received: nothing (`before_first_token`), the first tokens (`before_second_chunk`), or "
        "more (`streaming`)"
    ),
}


def registries() -> Iterator[tuple[str, str, CollectorRegistry]]:
    """(heading, text, registry with a sample of each metric)."""
    config = WorkerConfig(model="m", role=Role.DECODE)
    engine, load = EngineMetrics(HandoffsHeld()), LoadMetrics(Queued(), CircuitBreaker(1, 1.0))
    totals = dict.fromkeys(("kvPulls", "kvBytesPulled", "kvBytesSaved", "kvPushes", "kvBytesPushed"), 1)
    engine.update(
        {
            "kvCacheStats": {"usedNumBlocks": 1, "maxNumBlocks": 2},
            "inflightBatchingStats": {"numScheduledRequests": 1},
            "totals": totals,
            "modelled": {"stepMS": 1.0, "lateMS": 1.0},
        }
    )
    requests, of_engine, front = RequestMetrics(), EngineRequestMetrics("m"), FrontendRequests(config, 1)
    of_engine.registry.register(steps := StepMetrics("m"))
    ones = {part: dict.fromkeys(gauges.values(), 1) for part, gauges in STEP_GAUGES.items()}
    windows = {"32": dict.fromkeys(("iterReusedBlocks", "secondaryMaxNumBlocks"), 1)}
    steps.update(ones[""] | ones | {"iterLatencyMS": 1, "kvCacheIterationStats": windows})
    request = decode_request({"model": "m", "token_ids": [1]})
    request.trace.chose("decode_first", "default")
    requests.ended(RequestEnd(request, 1, False, 1.0))
    dynamo = DynamoMetrics(config, 2)
    dynamo.update({"kvCacheStats": {"usedNumBlocks": 1, "maxNumBlocks": 2, "cacheHitRate": 0.5}})
    dynamo.loaded(1.0)
    meanings = "\n".join(f"| {label} | {text} |" for label, text in LABELS.items())
    counted = f"Counted when a request ends on this worker.\n\n| label | values |\n|---|---|\n{meanings}"
    yield "Requests", counted, requests.registry
    yield (
        "Engine and worker",
        "From the engine's statistics. Only the embedded engine counts KV transfers here.",
        registry_of(engine, load),
    )
    yield (
        "Prefill queue",
        "With `--prefill-dispatch queue`.",
        registry_of(QueueMetrics(lambda: 1, lambda: 1.0)),
    )
    yield (
        "As TensorRT-LLM's server shows them",
        "The engine's own measurements of finished requests (`metrics_dict`) and of its last step, under the names of "
        "TensorRT-LLM's `MetricsCollector`. With attention DP, the step is that of the rank that reported last.",
        of_engine.registry,
    )
    yield (
        "As Dynamo's worker shows them",
        "Dashboards of Dynamo and of `dynamo.trtllm` query these.",
        dynamo.registry,
    )
    yield (
        "By role",
        "Where workers call each other, frontends reach the first stage at the component `tensorrt_llm`, and Dynamo "
        "counts its requests there. These count them again under the role, as Dynamo's dashboards query them, without "
        "the label `model`, so that a sum over a model's requests counts each once.",
        front.registry,
    )


def columns(metric: Metric) -> tuple[str, str, str]:
    labels = dict.fromkeys(f"`{label}`" for sample in metric.samples for label in sample.labels)
    shown = [label for label in labels if label.strip("`") not in ("le", "engine_type", *EVERYWHERE)]
    return metric.type, ", ".join(shown), metric.documentation


def rows(registry: CollectorRegistry) -> Iterator[Sequence[str]]:
    """Neighbours that differ only in name share a row."""
    for shared, metrics in groupby(registry.collect(), columns):
        names = (f"`{metric.name}{'_total' * (metric.type == 'counter')}`" for metric in metrics)
        yield ", ".join(names), *shared


def page() -> str:
    parts = [HEAD]
    for heading, text, registry in registries():
        lines = "\n".join(f"| {' | '.join(row)} |" for row in rows(registry))
        parts.append(f"## {heading}\n\n{text}\n\n| metric | type | labels | |\n|---|---|---|---|\n{lines}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    OUT.write_text(page())
