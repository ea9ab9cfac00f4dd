"""What the end of a request adds to /metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tests.support.handling import request
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.request_metrics import (
    EngineRequestMetrics,
    FrontendRequests,
    RequestMetrics,
    phase_of_frontends,
)
from trtllm_disagg.engines.embedded.api.perf_metrics import FINISHED_REASON, MetricNames
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.handlers.trace import KV_TRANSFER_BYTES, KV_TRANSFER_MS, RequestEnd
from trtllm_disagg.types import GenerateRequest, PhaseRequest

OURS = "trtllm_disagg_"
ALL_OF_DECODE = {"decode_sends_all": True}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def whole(strategy: str = "decode_first", reason: str = "default", **facts: Any) -> GenerateRequest:
    asked = request(4)
    asked.trace.chose(strategy, reason)
    asked.trace.facts |= facts
    return asked


def end(asked: GenerateRequest, *chunks: float, seconds: float = 2.0, aborted: bool = False) -> RequestEnd:
    return RequestEnd(asked, 10, aborted, seconds, *chunks)


def test_a_whole_request_is_counted_by_what_ran_and_why() -> None:
    metrics = RequestMetrics()
    failed = whole("decode_first", "long", prefill_instance="1a")
    failed.trace.fell_back("other_instance", KvTransferError("gone"))
    failed.trace.fell_back("direct", "pinned prefill instance 7 is gone")
    for asked in (whole(prefill_instance="1a"), failed):
        metrics.ended(end(asked, 0.1, 0.4))
    shown = metrics.registry
    ways = {"strategy": "decode_first", "reason": "default", "fallback": "none"}
    assert value(shown, f"{OURS}requests_total", **ways) == 1
    assert value(shown, f"{OURS}requests_total", **ways | {"reason": "long", "fallback": "direct"}) == 1
    assert value(shown, f"{OURS}fallbacks_total", to="other_instance", cause="KvTransferError") == 1
    assert value(shown, f"{OURS}fallbacks_total", to="direct", cause="wish") == 1
    assert value(shown, f"{OURS}first_chunk_seconds_sum", phase="whole") == pytest.approx(0.2)
    assert value(shown, f"{OURS}second_chunk_gap_seconds_sum", phase="whole") == pytest.approx(0.6)
    assert value(shown, f"{OURS}request_seconds_sum", phase="whole") == 4


@pytest.mark.parametrize(
    ("settings", "facts", "source", "relayed"),
    [
        ({}, {}, "own_engine", 0),
        ({}, {"decode_instance": "7"}, "own_engine", 9),
        ({}, {"prefill_instance": "7"}, "prefill_worker", 0),
        ({}, {"first_stage": "7"}, "other_first_stage", 10),
        # Under generation-first every token is decode's.
        (ALL_OF_DECODE, {"decode_instance": "7"}, "decode_worker", 10),
        (ALL_OF_DECODE, {"prefill_instance": "7"}, "own_engine", 0),
        (ALL_OF_DECODE, {}, "own_engine", 0),
        (ALL_OF_DECODE, {"decode_instance": "7", "first_stage": "8"}, "other_first_stage", 10),
        # From the prefill queue, the worker that pushes a prefill may pull it itself.
        ({"instance_id": 7}, {"prefill_instance": "7", "decode_instance": "9"}, "own_engine", 9),
        ({"instance_id": 7}, {"prefill_instance": "8", "decode_instance": "9"}, "prefill_worker", 10),
    ],
)
def test_tokens_are_counted_by_where_they_came_from(
    settings: dict[str, Any], facts: dict[str, str], source: str, relayed: int
) -> None:
    metrics = RequestMetrics(**settings)
    metrics.ended(RequestEnd(whole(**facts), 0, False, 2.0, 0.1))
    assert value(metrics.registry, f"{OURS}relayed_tokens_total") == 0, "it had no tokens"
    metrics.ended(end(whole(**facts), 0.1))
    assert value(metrics.registry, f"{OURS}first_tokens_total", source=source) == 2
    assert value(metrics.registry, f"{OURS}relayed_tokens_total") == relayed


@pytest.mark.parametrize(
    ("chunks", "point"),
    [((), "before_first_token"), ((0.1,), "before_second_chunk"), ((0.1, 0.2), "streaming")],
)
def test_a_client_that_leaves_is_counted_by_how_far_its_answer_was(
    chunks: tuple[float, ...], point: str
) -> None:
    metrics = RequestMetrics()
    metrics.ended(end(whole(), *chunks, aborted=True))
    assert value(metrics.registry, f"{OURS}cancelled_total", phase="whole", point=point) == 1


def phase(stage: Any) -> GenerateRequest:
    return msgspec.structs.replace(request(4), phase_request=PhaseRequest(stage))


def test_phase_is_counted_apart_from_whole_requests() -> None:
    metrics = RequestMetrics()
    asked = phase("decode")
    asked.trace.facts |= {KV_TRANSFER_MS: 500.0, KV_TRANSFER_BYTES: 4096}
    metrics.ended(end(asked, 0.1))
    shown = metrics.registry
    assert value(shown, f"{OURS}request_seconds_count", phase="decode") == 1
    assert value(shown, f"{OURS}request_seconds_count", phase="whole") == 0
    assert value(shown, f"{OURS}first_tokens_total", source="own_engine") == 0
    assert value(shown, f"{OURS}kv_transfer_seconds_sum") == 0.5
    assert value(shown, f"{OURS}kv_transfer_bytes_sum") == 4096
    assert not any(sample.name == f"{OURS}requests_total" for sample in _samples(shown))


def test_a_request_that_was_passed_on_is_counted_once_as_a_whole_one() -> None:
    sent_on, served = RequestMetrics(), RequestMetrics()
    sent_on.ended(end(whole("prefill_first", "auto_busy", first_stage="7"), 0.1, 0.4, aborted=True))
    passed_on = msgspec.structs.replace(
        whole("prefill_first", "asked_by_worker", decode_instance="7"),
        phase_request=PhaseRequest("whole", "prefill_first"),
    )
    served.ended(end(passed_on, 0.1, 0.4, aborted=True))

    def total(name: str) -> float:
        samples = [*_samples(sent_on.registry), *_samples(served.registry)]
        return sum(float(each.value) for each in samples if each.name == OURS + name)

    assert (total("requests_total"), total("first_tokens_total"), total("relayed_tokens_total")) == (1, 1, 10)
    for metrics, phase in ((sent_on, "whole"), (served, "relayed")):
        assert value(metrics.registry, f"{OURS}request_seconds_count", phase=phase) == 1
        assert value(metrics.registry, f"{OURS}cancelled_total", phase=phase, point="streaming") == 1
    assert value(served.registry, f"{OURS}request_seconds_count", phase="whole") == 0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_under_router_the_decode_worker_alone_counts_a_whole_request(role: Role) -> None:
    config = WorkerConfig(model="org/model", role=role, strategy="router")
    metrics = RequestMetrics(phase_of_frontends(config))
    metrics.ended(end(whole("router"), 0.1))
    wholes = float(role is Role.DECODE)
    assert value(metrics.registry, f"{OURS}request_seconds_count", phase="whole") == wholes
    assert value(metrics.registry, f"{OURS}request_seconds_count", phase="prefill") == 1 - wholes
    assert value(metrics.registry, f"{OURS}first_tokens_total", source="own_engine") == wholes
    counted = [each.value for each in _samples(metrics.registry) if each.name == f"{OURS}requests_total"]
    assert counted == [1.0] * int(wholes)


def _samples(registry: CollectorRegistry) -> list[Any]:
    return [sample for metric in registry.collect() for sample in metric.samples]


@settings(max_examples=10)
@given(
    said=st.lists(st.tuples(st.text(), st.text(), st.text(), st.text(), st.text()), min_size=30, max_size=60)
)
def test_hostile_label_values_make_no_series_beyond_the_bound(said: list[tuple[str, ...]]) -> None:
    metrics, of_engine = RequestMetrics(), EngineRequestMetrics("m")
    for strategy, reason, to, cause, finished in said:
        asked = whole(strategy, reason)
        asked.trace.steps.append((to, cause))
        asked.trace.measured = {FINISHED_REASON: finished}
        for sink in (metrics, of_engine):
            sink.ended(end(asked, 0.1))
    for registry in (metrics.registry, of_engine.registry):
        for metric in registry.collect():
            values: dict[str, set[str]] = {}
            for sample in metric.samples:
                for label in sample.labels.keys() - {"le"}:
                    values.setdefault(label, set()).add(sample.labels[label])
            assert all(len(each) <= 25 for each in values.values()), metric.name


def test_engine_measurements_have_the_metric_names_of_tensorrt_llms_server() -> None:
    metrics = EngineRequestMetrics("m")
    asked = whole()
    asked.trace.measured = {
        FINISHED_REASON: "length",
        MetricNames.TTFT: 0.5,
        MetricNames.E2E: 2.0,
        MetricNames.REQUEST_QUEUE_TIME: 0.25,
        MetricNames.GENERATION_TOKENS: 10,
        "tpot": 0.125,
    }
    metrics.ended(end(asked, 0.1))
    metrics.ended(end(whole(), 0.1))  # not measured
    mode = {"model_name": "m", "engine_type": "trtllm"}
    assert value(metrics.registry, "trtllm_request_success_total", **mode, finished_reason="length") == 1
    for name, seconds in (
        ("time_to_first_token_seconds", 0.5),
        ("e2e_request_latency_seconds", 2.0),
        ("request_queue_time_seconds", 0.25),
        ("time_per_output_token_seconds", 0.125),
    ):
        assert value(metrics.registry, f"trtllm_{name}_sum", **mode) == seconds
        assert value(metrics.registry, f"trtllm_{name}_count", **mode) == 1
    assert value(metrics.registry, "trtllm_generation_tokens_total", **mode) == 10
    assert value(metrics.registry, "trtllm_prompt_tokens_total", **mode) == len(asked.token_ids)


class Page:
    """A Dynamo endpoint, as far as metrics go."""

    def __init__(self) -> None:
        self.metrics = self
        self.callbacks: list[Callable[[], str]] = []

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        self.callbacks.append(callback)

    def register_prometheus_typed_callback(self, callback: Callable[[], Any]) -> None:
        """For OTLP."""


@pytest.mark.parametrize(("role", "component"), [(Role.PREFILL, "prefill"), (Role.DECODE, "backend")])
def test_a_first_stage_shows_frontends_requests_by_its_role(role: Role, component: str) -> None:
    config = WorkerConfig(model="m", role=role, strategy=f"{role}_first")
    metrics, page = FrontendRequests(config, 255), Page()
    metrics.expose(page)
    metrics.ended(end(whole(), 0.1))
    metrics.ended(end(phase("decode"), 0.1))
    (callback,) = page.callbacks
    # Dynamo has its own HELP and TYPE of these on the page, and a second one is an error to promtool.
    text = callback()
    assert "#" not in text
    where = {
        "dynamo_namespace": "dynamo",
        "dynamo_component": component,
        "dynamo_endpoint": "generate",
        "worker_id": "ff",
    }
    samples = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    for name, expected in (("requests_total", 1), ("request_duration_seconds_sum", 2.0)):
        sample = samples[f"dynamo_component_{name}"]
        assert (sample.labels, sample.value) == (where, expected)
