"""What the engine's statistics say on /metrics, and that they say so when nothing but a holding changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from tests.conftest import Checkpoints
from tests.support.clock import Clock
from tests.support.cores import Core
from trtllm_disagg.dynamo_runtime.metrics import OTHER, EngineMetrics, LabelValues, LoadMetrics, StepMetrics
from trtllm_disagg.engine.handoffs_held import HandoffsHeld
from trtllm_disagg.handlers.admission import Queued
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker

#: Shown without any statistics.
OWN = {"handoffs_held": 0, "handoffs_oldest_seconds": 0}


def made(*, handoffs: HandoffsHeld | None = None, clock: Clock | None = None) -> EngineMetrics:
    return EngineMetrics(handoffs or HandoffsHeld(), clock or Clock())


def shown(metrics: Collector | CollectorRegistry) -> dict[str, float]:
    return {
        sample.name.removeprefix("trtllm_disagg_"): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }


def step(context: int = 0, generating: int = 0, used: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "inflightBatchingStats": {"numCtxTokens": context, "numGenRequests": generating},
        "kvCacheStats": {"usedNumBlocks": used},
        "numActiveRequests": 1,
        "numQueuedRequests": 2,
        **more,
    }


def test_a_step_is_shown_under_tensorrt_llms_names_and_nothing_runs_at_rest() -> None:
    metrics = StepMetrics("m")
    metrics.update({"numActiveRequests": 3, "gpuMemUsage": 0, "iterLatencyMS": 12.0})
    blocks = {"usedNumBlocks": 2, "maxNumBlocks": 8, "cacheHitRate": None}
    windows = {"32": {"iterReusedBlocks": 3, "iterMissedBlocks": 1}, "64": {"iterReusedBlocks": 0}}
    metrics.update({"numActiveRequests": 4, "kvCacheStats": blocks, "kvCacheIterationStats": windows})
    expected = {
        "trtllm_num_requests_running": 4,
        "trtllm_gpu_memory_usage_bytes": 0,
        "trtllm_iteration_latency_seconds": 0.012,
        "trtllm_kv_cache_max_blocks": 8,
        "trtllm_kv_cache_used_blocks": 2,
        "trtllm_kv_cache_utilization": 0.25,
        "trtllm_kv_cache_iter_reuse_rate": 0.75,
    }
    assert shown(metrics) == expected
    metrics.show_idle()
    assert shown(metrics) == expected | {"trtllm_num_requests_running": 0}


def test_tokens_of_steps_are_summed_and_used_blocks_are_not() -> None:
    metrics = made()
    assert shown(metrics) == OWN, "before the first statistic"
    metrics.update(step(context=100, used=7))
    metrics.update(step(context=20, generating=3, used=5))

    assert shown(metrics) == {
        "prefill_tokens_total": 120,
        "decode_tokens_total": 3,
        "kv_blocks_used": 5,
        "requests_active": 3,
        **OWN,
    }


def test_lateness_of_modelled_steps_is_summed_in_seconds() -> None:
    metrics = made()
    ran = {"numScheduledRequests": 1}
    for late, batch in ((2.0, ran), (3.0, ran), (3.0, {"numScheduledRequests": 0})):
        metrics.update(
            {"inflightBatchingStats": batch, "modelled": {"stepMS": 10.0, "lateMS": late, "timeScale": 4.0}}
        )

    told = shown(metrics)
    assert told["modelled_steps_total"] == 2
    assert told["modelled_step_seconds_total"] == pytest.approx(0.02)
    assert told["modelled_late_seconds_total"] == pytest.approx(0.005)


def test_ranks_of_attention_dp_hold_together() -> None:
    metrics = made()
    for rank, used in ((0, 7), (1, 5), (0, 6)):
        metrics.update(step(context=10, used=used, attentionDpRank=rank))

    assert shown(metrics)["kv_blocks_used"] == 11
    assert shown(metrics)["prefill_tokens_total"] == 30


def drafted(accepted: int, requests: int) -> dict[str, Any]:
    return {"specDecodingStats": {"numAcceptedTokens": accepted, "numRequestsWithDraftTokens": requests}}


@pytest.mark.parametrize(
    ("steps", "tokens"),
    [
        # TensorRT-LLM: a step gives each request one token, and what it accepts of its draft (py_executor.py).
        ([step(generating=4, **drafted(6, 3)), step(generating=1, specDecodingStats=None)], 4 + 6 + 1),
        # It gives all ranks of attention DP the drafts of rank 0.
        (
            [
                step(generating=3, attentionDpRank=0, **drafted(6, 3)),
                step(generating=1, attentionDpRank=1, **drafted(6, 3)),
                step(generating=2, attentionDpRank=1, **drafted(0, 0)),
            ],
            9 + 3 + 2,
        ),
    ],
)
def test_accepted_draft_tokens_count_as_decode_tokens(steps: list[dict[str, Any]], tokens: int) -> None:
    metrics = made()
    for each in steps:
        metrics.update(each)
    assert shown(metrics)["decode_tokens_total"] == tokens


def test_handoffs_and_pulls_are_shown_where_the_engine_knows_them() -> None:
    metrics = made()
    metrics.update(step(totals={"kvPulls": 2, "kvBytesPulled": 4096, "kvBytesSaved": 512}, numHandoffsHeld=1))

    assert shown(metrics)["kv_pulls_total"] == 2
    assert shown(metrics)["kv_bytes_pulled_total"] == 4096
    assert shown(metrics)["kv_bytes_saved_total"] == 512
    assert shown(metrics)["handoffs_held"] == 1


def test_age_of_the_oldest_handoff_grows_between_statistics() -> None:
    metrics = made(clock=(clock := Clock()))
    metrics.update(step(numHandoffsHeld=2, oldestHandoffAt=clock() - 3))
    metrics.update(step(numHandoffsHeld=1, oldestHandoffAt=clock() - 1, attentionDpRank=1))
    clock.now += 4
    assert (shown(metrics)["handoffs_held"], shown(metrics)["handoffs_oldest_seconds"]) == (3, 7)
    for rank in (None, 1):
        metrics.update(step(numHandoffsHeld=0, oldestHandoffAt=None, attentionDpRank=rank))
    assert (shown(metrics)["handoffs_held"], shown(metrics)["handoffs_oldest_seconds"]) == (0, 0)
    # TensorRT-LLM counts none: those that the worker knows.
    handoffs = HandoffsHeld(clock=clock)
    metrics = made(handoffs=handoffs)
    handoffs.hold()
    clock.now += 2
    metrics.update(step())
    assert (shown(metrics)["handoffs_held"], shown(metrics)["handoffs_oldest_seconds"]) == (1, 2)


def test_a_breaker_shows_while_it_is_open() -> None:
    clock = Clock()
    breaker = CircuitBreaker(2, 5.0, clock)
    metrics = LoadMetrics(Queued(), breaker)
    for _ in range(3):
        breaker.failed(7)
    assert (shown(metrics)["breakers_open"], shown(metrics)["breakers_opened_total"]) == (1, 2)
    clock.now += 5
    assert (shown(metrics)["breakers_open"], shown(metrics)["breakers_opened_total"]) == (0, 2)


@given(values=st.lists(st.text(), max_size=80))
def test_a_label_has_no_more_values_than_its_bound(values: list[str]) -> None:
    bound = LabelValues("known", max_values=5)
    shown_values = {bound.bound(value) for value in [*values, "known"]}
    assert "known" in shown_values
    assert len(shown_values - {OTHER}) <= 5


@pytest.fixture
def prefill(checkpoints: Checkpoints) -> Iterator[Core]:
    core = Core(checkpoints(), cache_transceiver_config={"backend": "SHARED_MEMORY"})
    yield core
    core.close()


def test_released_handoff_changes_the_metrics_without_another_step(prefill: Core) -> None:
    request_id = prefill.add([5] * 40, request_type="context_only")
    prefill.run(request_id)
    held = prefill.stats[-1]
    assert (held["numHandoffsHeld"], held["kvCacheStats"]["usedNumBlocks"]) == (1, 2)
    assert 0 < held["oldestHandoffAt"] <= time.monotonic()

    prefill.engine.abort(request_id)
    prefill.settle()

    free = prefill.stats[-1]
    assert (free["numHandoffsHeld"], free["kvCacheStats"]["usedNumBlocks"]) == (0, 0)
    assert free["oldestHandoffAt"] is None

    told = len(prefill.stats)
    prefill.step()
    assert len(prefill.stats) == told, "an idle engine repeats nothing"
