"""What the engine's statistics say on /metrics, and that they say so when nothing but a holding changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from trtllm_disagg.dynamo_runtime.metrics import EngineMetrics

#: What the worker itself counts.
QUEUE = {"requests_shed_total": 0, "queued_requests": 0, "queued_tokens": 0}


def shown(metrics: EngineMetrics) -> dict[str, float]:
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


def test_steps_add_up_and_holdings_do_not() -> None:
    metrics = EngineMetrics()
    metrics.update(step(context=100, used=7))
    metrics.update(step(context=20, generating=3, used=5))

    assert shown(metrics) == {
        "prefill_tokens_total": 120,
        "decode_tokens_total": 3,
        "kv_blocks_used": 5,
        "requests_active": 3,
        **QUEUE,
    }


def test_steps_of_a_modelled_gpu_tell_how_late_they_were() -> None:
    metrics = EngineMetrics()
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
    metrics = EngineMetrics()
    for rank, used in ((0, 7), (1, 5), (0, 6)):
        metrics.update(step(context=10, used=used, attentionDpRank=rank))

    assert shown(metrics)["kv_blocks_used"] == 11
    assert shown(metrics)["prefill_tokens_total"] == 30


def test_handoffs_and_pulls_are_shown_where_the_engine_knows_them() -> None:
    metrics = EngineMetrics()
    metrics.update(step(totals={"kvPulls": 2, "kvBytesPulled": 4096, "kvBytesSaved": 512}, numHandoffsHeld=1))

    assert shown(metrics)["kv_pulls_total"] == 2
    assert shown(metrics)["kv_bytes_pulled_total"] == 4096
    assert shown(metrics)["kv_bytes_saved_total"] == 512
    assert shown(metrics)["handoffs_held"] == 1


def test_nothing_of_the_engine_is_shown_before_it_has_said_anything() -> None:
    assert shown(EngineMetrics()) == QUEUE


@pytest.fixture
def prefill(checkpoints: Checkpoints) -> Iterator[Core]:
    core = Core(checkpoints(), cache_transceiver_config={"backend": "SHARED_MEMORY"})
    yield core
    core.close()


def test_a_handoff_that_is_let_go_shows_without_another_step(prefill: Core) -> None:
    request_id = prefill.add([5] * 40, request_type="context_only")
    prefill.run(request_id)
    held = prefill.stats[-1]
    assert (held["numHandoffsHeld"], held["kvCacheStats"]["usedNumBlocks"]) == (1, 2)

    prefill.engine.abort(request_id)
    prefill.settle()

    free = prefill.stats[-1]
    assert (free["numHandoffsHeld"], free["kvCacheStats"]["usedNumBlocks"]) == (0, 0)


def test_an_idle_engine_repeats_nothing(prefill: Core) -> None:
    prefill.generate([5] * 40)
    said = len(prefill.stats)

    prefill.step()

    assert len(prefill.stats) == said
