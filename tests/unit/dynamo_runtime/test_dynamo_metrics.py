"""What Dynamo's dashboards look for, under the names of Dynamo's own TensorRT-LLM worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.handling import collect, request
from tests.support.stage_client import FakeContext
from tests.support.trying import logged
from tests.unit.handlers.test_measured import CAME, decoder, prefilled
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import DynamoMetrics
from trtllm_disagg.dynamo_runtime.publishers import KvEventForwarder
from trtllm_disagg.engine.cache_events import CacheEvents
from trtllm_disagg.engine.capabilities import event_buffer_of
from trtllm_disagg.handlers.trace import KV_TRANSFER_BYTES, KV_TRANSFER_MS, RequestEnd, RequestSink
from trtllm_disagg.types import TokenChunk

BLOCKS = {"model": "llama", "dynamo_component": "backend"}
MODE = {"model_name": "llama", "disaggregation_mode": "decode", "engine_type": "trtllm"}


def made(role: Role = Role.DECODE, num_ranks: int = 1) -> DynamoMetrics:
    return DynamoMetrics(WorkerConfig(model="llama", role=role), 200, num_ranks)


def value(metrics: DynamoMetrics, name: str, **more: str) -> float | None:
    ours = BLOCKS if name.startswith("dynamo_component") else MODE
    return metrics.registry.get_sample_value(name, ours | more)


def stat(used: int, **more: Any) -> dict[str, Any]:
    return {"kvCacheStats": {"usedNumBlocks": used, "maxNumBlocks": 200, "cacheHitRate": 0.25}} | more


def test_every_series_is_there_before_the_first_request() -> None:
    metrics = made(num_ranks=2)
    for rank in ("0", "1"):
        assert value(metrics, "dynamo_component_total_blocks", dp_rank=rank) == 200
        assert value(metrics, "dynamo_component_gpu_cache_usage_percent", dp_rank=rank) == 0
        assert value(metrics, "dynamo_component_kvstats_active_blocks", dp_rank=rank) == 0
    where = {"model": "llama", "dynamo_component": "prefill", "dp_rank": "0"}
    assert made(Role.PREFILL).registry.get_sample_value("dynamo_component_total_blocks", where) == 200
    for name in ("kv_transfer_success", "num_aborted_requests", "request_type_structured_output"):
        assert value(metrics, f"trtllm_{name}_total") == 0
    assert value(metrics, "trtllm_kv_transfer_latency_seconds_count") == 0


def test_the_blocks_of_each_rank_follow_the_statistics() -> None:
    metrics = made(num_ranks=2)
    metrics.update(stat(50))
    metrics.update(stat(100, attentionDpRank=1))
    metrics.update({"kvCacheStats": None})
    metrics.loaded(12.5)
    for usage in ("gpu_cache_usage_percent", "kvstats_gpu_cache_usage_percent"):
        assert [value(metrics, f"dynamo_component_{usage}", dp_rank=rank) for rank in "01"] == [0.25, 0.5]
    assert value(metrics, "dynamo_component_kvstats_total_blocks", dp_rank="1") == 200
    assert value(metrics, "dynamo_component_kvstats_active_blocks", dp_rank="1") == 100
    assert value(metrics, "dynamo_component_kv_cache_hit_rate", dp_rank="0") == 0.25
    assert value(metrics, "dynamo_component_model_load_time_seconds") == 12.5


def test_cache_usage_is_0_until_an_engine_of_unknown_capacity_reports_it() -> None:
    """TensorRT-LLM without get_kv_cache_capacity."""
    metrics = DynamoMetrics(WorkerConfig(model="llama", role=Role.DECODE), 0)
    usage = "dynamo_component_kvstats_gpu_cache_usage_percent"
    assert value(metrics, usage, dp_rank="0") == 0
    metrics.update(stat(50))
    assert value(metrics, usage, dp_rank="0") == 0.25


def test_a_transfer_that_took_no_time_has_no_speed() -> None:
    metrics = made()
    moved = request()
    moved.trace.facts |= {KV_TRANSFER_MS: 0.0, KV_TRANSFER_BYTES: 4096}
    metrics.ended(RequestEnd(moved, 1, False, 1.0))
    assert value(metrics, "trtllm_kv_transfer_success_total") == 1
    assert value(metrics, "trtllm_kv_transfer_speed_gb_s_count") == 0


@pytest.mark.usefixtures("no_leaks")
async def test_a_transfer_is_counted_with_its_time_size_and_speed() -> None:
    metrics = made()

    await collect(decoder(CAME, [metrics]), await prefilled())

    assert value(metrics, "trtllm_kv_transfer_success_total") == 1
    assert value(metrics, "trtllm_kv_transfer_latency_seconds_sum") == pytest.approx(0.012)
    assert value(metrics, "trtllm_kv_transfer_bytes_sum") == 4096
    assert value(metrics, "trtllm_kv_transfer_speed_gb_s_sum") == pytest.approx(4096 / 0.012 / 1e9)
    assert value(metrics, "trtllm_num_aborted_requests_total") == 0


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(("finish_reason", "aborted"), [(None, 1), ("stop", 0)])
async def test_a_request_is_aborted_when_its_client_leaves_before_the_end(
    finish_reason: str | None, aborted: int
) -> None:
    metrics, context = made(), FakeContext()
    sinks: list[RequestSink] = [metrics]

    async def answer(asked: Any, context: Any) -> Any:
        yield TokenChunk([1], finish_reason=finish_reason)
        context.stop()

    guided = request(sampling_options={"guided_decoding": {"json": {"type": "object"}}})
    assert guided.sampling.guided_decoding is not None
    async for _ in logged(answer, "x", sinks)(guided, context):
        pass

    assert value(metrics, "trtllm_num_aborted_requests_total") == aborted
    assert value(metrics, "trtllm_request_type_structured_output_total") == 1


async def test_polls_of_cache_events_and_lost_ones_are_counted() -> None:
    metrics = made()
    events = CacheEvents(num_ranks=1, block_size=4, buffer_size=0)
    await KvEventForwarder(events, {}, metrics).start()
    events.receive([{"event_id": number, "data": {"type": "created"}} for number in (0, 1, 5)])
    assert value(metrics, "trtllm_kv_event_drain_batch_size_sum") == 3
    assert value(metrics, "trtllm_kv_event_id_gap_events_total") == 3


@pytest.mark.parametrize(
    "kv_cache",
    [{"event_buffer_max_size": 7}, SimpleNamespace(event_buffer_max_size=7)],
    ids=["dict", "model"],
)
def test_the_engines_event_buffer_is_shown_where_events_are_polled(kv_cache: Any) -> None:
    metrics = made()
    assert value(metrics, "trtllm_kv_event_buffer_capacity") == 0
    llm = SimpleNamespace(args=SimpleNamespace(kv_cache_config=kv_cache))
    metrics.event_buffer.set(event_buffer_of(llm))
    assert value(metrics, "trtllm_kv_event_buffer_capacity") == 7
    assert event_buffer_of(object()) == 0
