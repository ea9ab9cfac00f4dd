"""Writes docs/reference/metrics.md from the metrics themselves: `python -m tools.metrics_page`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
HEAD = """# Metrics

On `http://WORKER:PORT/metrics` of a worker with `--publish-metrics` and `DYN_SYSTEM_PORT=PORT`, 32767 at most. The page
also has the metrics of Dynamo's runtime (`dynamo_component_*` of endpoints, `dynamo_work_handler_*`). A histogram has
`_bucket`, `_sum` and `_count`.

Each metric also has the labels `dynamo_namespace`, `dynamo_component`, `dynamo_endpoint`, `worker_id`, `model` and
`model_name`. The number of values of a label is bounded; values beyond the bound are shown as `other`. Made by
`tools/metrics_page.py`. [Dashboards and alerts](../how-to/alerts.md).

Three words for a worker:

| word | |
|---|---|
| role | what its engine does: `prefill`, `decode`, or `agg`, which does both |
| component | the role's name in Dynamo, the label `dynamo_component`: `prefill`; `backend` for decode and agg |
| stage | its place in a request. The frontend sends it to a first stage, which calls a second one, of the other role |
|  | `decode_first`: the decode worker is the first; `prefill_first`: the prefill worker; `agg`: there is no second |
"""

#: What the values of the labels under "Requests" mean.
LABELS = {
    "`strategy`": (
        "what ran: `prefill_first`, `decode_first`, `agg`, `router`, or `local`: this worker alone did both "
        "phases"
    ),
    "`reason`": (
        "why. Under `agg` and `router`: `default`. Where the request asked for it: `annotation`. Else the "
        "reason of the [decider](deciders.md): `always`, `short`, `long`, `queue_full`, ...; under `auto` "
        "with `auto_` before it, and also `auto_no_peer` (no healthy worker of the other role) or "
        "`auto_busy` (this worker's batch is full, so the other order ran). `nothing_left`: the worker that "
        "died had sent all of the answer but its end"
    ),
    "`fallback`, `to`": (
        "how a request went on after a failure: `other_instance` (another worker in place of the called "
        "one), `direct` (a prefill worker, without the prefill queue), `local` (this worker alone), "
        "`other_stage` (a worker of the other role answers all of it). `fallback` is the last of these "
        "steps, or `none`"
    ),
    "`cause`": ("the failure, by the name of its [error](errors.md)"),
    "`source`": (
        "where the first token was made: `own_engine`, `prefill_worker`, `decode_worker` (generation_first), "
        "or `other_first_stage`, to which "
        "this worker had passed the request on"
    ),
    "`phase`": (
        "`whole`: a request of a frontend; `relayed`: one that another first stage has passed on; "
        "`prefill`, `decode`: one half, done for another worker. Under `router` a prefill worker's are "
        "`prefill`"
    ),
    "`point`": (
        "what the client had when it left: nothing (`before_first_token`), the first tokens only "
        "(`before_second_chunk`), or more (`streaming`)"
    ),
}


def registries() -> Iterator[tuple[str, str, CollectorRegistry]]:
    """(heading, text, registry), each registry with a sample of every metric."""
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
    counted = f"Counted when a request ends on this worker.\n\n| label | its values |\n|---|---|\n{meanings}"
    yield "Requests", counted, requests.registry
    yield (
        "Engine and worker",
        "From the engine's statistics; totals of KV only on the embedded engine.",
        registry_of(engine, load),
    )
    yield (
        "Prefill queue",
        "With `--prefill-dispatch queue`.",
        registry_of(QueueMetrics(lambda: 1, lambda: 1.0)),
    )
    yield (
        "As TensorRT-LLM's server shows them",
        "What the engine measured of requests that it finished, from its `metrics_dict`, under the names of "
        "TensorRT-LLM's `MetricsCollector`; and its last step (of the ranks of attention DP: the one that told last).",
        of_engine.registry,
    )
    yield (
        "As Dynamo's worker shows them",
        "Dynamo's dashboards ask for these, and so do those for `dynamo.trtllm`.",
        dynamo.registry,
    )
    yield (
        "By role",
        "Where a worker calls a worker, frontends reach the first stage at the component `tensorrt_llm`, under which "
        "Dynamo counts these requests. Here they are once more, by the role of the worker, as Dynamo's dashboards ask "
        "for them; without `model`, so that sums over a model's requests have each once.",
        front.registry,
    )


def labels_of(metric: Metric) -> list[str]:
    names = {name: None for sample in metric.samples for name in sample.labels if name != "le"}
    return list(names)


def rows(registry: CollectorRegistry) -> Iterator[Sequence[str]]:
    for metric in registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in labels_of(metric))
        yield f"`{name}`", metric.type, labels, metric.documentation


def page() -> str:
    parts = [HEAD]
    for heading, text, registry in registries():
        lines = "\n".join(f"| {' | '.join(row)} |" for row in rows(registry))
        parts.append(f"## {heading}\n\n{text}\n\n| metric | type | labels | |\n|---|---|---|---|\n{lines}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    OUT.write_text(page())
