"""The engine's statistics become the router's load, and what /metrics shows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.handling import until
from tests.support.sinks import RecordingLoadSink, RecordingStatsSink
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import DynamoMetrics, EngineMetrics, registry_of
from trtllm_disagg.dynamo_runtime.publishers import SILENT_SECONDS, StatsForwarder
from trtllm_disagg.engine.handoffs_held import HandoffsHeld
from trtllm_disagg.engines.recording.llm import LLM


def stat(used: int, rank: int | None = None) -> dict[str, Any]:
    return {"kvCacheStats": {"usedNumBlocks": used}} | ({} if rank is None else {"attentionDpRank": rank})


class Published:
    """A forwarder on a recording LLM."""

    def __init__(self, *stats: dict[str, Any]) -> None:
        self.llm = LLM("m", enable_iter_perf_stats=True)
        self.llm.stats = list(stats)
        self.load, self.metrics = RecordingLoadSink(), RecordingStatsSink()
        self.publisher = StatsForwarder(self.llm, self.load, self.metrics)


@pytest.mark.parametrize(
    ("stats", "loads"),
    [
        ([stat(3), stat(5)], [(None, 5)]),
        ([stat(3, 0), stat(7, 1), stat(4, 0)], [(0, 4), (1, 7)]),
        ([], []),
        ([{}], [(None, 0)]),
        ([{"kvCacheStats": None}], [(None, 0)]),
        ([{"kvCacheStats": {}}], [(None, 0)]),
    ],
)
async def test_the_router_gets_the_newest_of_each_rank_and_the_metrics_get_all(
    stats: list[dict[str, Any]], loads: list[tuple[int | None, int]]
) -> None:
    published = Published(*stats)
    await published.publisher.poll()
    assert published.load.loads == loads
    assert published.metrics.stats == stats
    assert published.llm.stats == []
    assert published.llm.calls_of("get_stats_async") == [{"timeout": 0.01}]


async def test_empty_load_is_published_at_the_start() -> None:
    published = Published()
    await published.publisher.start()
    assert published.load.loads == [(None, 0)]
    published.llm.stats.append(stat(9))
    await until(lambda: len(published.load.loads) == 2)
    await published.publisher.stop()
    assert published.load.loads == [(None, 0), (None, 9)]


async def test_an_engine_without_requests_that_takes_no_steps_for_long_has_no_load() -> None:
    """TensorRT-LLM tells in its next step what was freed since the last one, and a router may send it none before."""
    clock = Clock()
    load = RecordingLoadSink()
    llm = LLM("m", enable_iter_perf_stats=True)
    llm.stats = [stat(90, 0), stat(80, 1)]
    publisher = StatsForwarder(llm, load, num_ranks=2, clock=clock)
    await publisher.poll()
    clock.now += SILENT_SECONDS - 0.1
    await publisher.poll()
    assert load.loads == [(0, 90), (1, 80)]
    clock.now += 0.1
    for _ in range(2):
        await publisher.poll()
    assert load.loads[2:] == [(0, 0), (1, 0)]
    llm.stats = [stat(70, 1)]
    await publisher.poll()
    clock.now += SILENT_SECONDS
    await publisher.poll()
    assert load.loads[4:] == [(1, 70), (0, 0), (1, 0)]


async def test_an_engine_that_hangs_with_requests_keeps_its_load_until_they_have_gone() -> None:
    clock, load, rests = Clock(), RecordingLoadSink(), list[float]()
    requests = {"one"}
    llm = LLM("m", enable_iter_perf_stats=True)
    llm.stats = [stat(90, 0)]
    publisher = StatsForwarder(
        llm,
        load,
        has_requests=lambda: bool(requests),
        on_rest=lambda: rests.append(clock.now),
        clock=clock,
    )
    for _ in range(3):
        await publisher.poll()
        clock.now += SILENT_SECONDS
    assert (load.loads, rests) == ([(0, 90)], [])
    requests.clear()
    await publisher.poll()
    assert load.loads == [(0, 90), (None, 0)]
    assert rests == [clock.now]


@pytest.mark.parametrize(
    ("says_of_handoffs", "shown"),
    [({}, [0, 0, 0]), ({"numHandoffsHeld": 1, "oldestHandoffAt": 0.0}, [99, 1, 0.99])],
    ids=["tensorrt_llm", "embedded"],
)
def test_engine_at_rest_holds_nothing_unless_its_records_tell_what_changes_between_steps(
    says_of_handoffs: dict[str, Any], shown: list[float]
) -> None:
    """TensorRT-LLM's last record may be of a full pool, and the alert TrtllmDisaggKvPoolFull is about that."""
    of_engine, of_dynamo = EngineMetrics(HandoffsHeld()), DynamoMetrics(WorkerConfig(model="m"), 100)
    full = {"kvCacheStats": {"usedNumBlocks": 99, "maxNumBlocks": 100}, "numActiveRequests": 1}
    for metrics in (of_engine, of_dynamo):
        metrics.update(full | says_of_handoffs)
        metrics.rest()
    pages = (registry_of(of_engine), of_dynamo.registry)
    values = {each.name: each.value for page in pages for metric in page.collect() for each in metric.samples}
    names = ("trtllm_disagg_kv_blocks_used", "trtllm_disagg_requests_active")
    assert [values[name] for name in (*names, "dynamo_component_gpu_cache_usage_percent")] == shown


async def test_a_failure_is_logged_and_does_not_reach_stop(caplog: pytest.LogCaptureFixture) -> None:
    """TensorRT-LLM without enable_iter_perf_stats, say."""
    publisher = StatsForwarder(LLM("m"), RecordingLoadSink(), RecordingStatsSink())
    await publisher.start()
    await until(lambda: "engine-stats: publishing failed" in caplog.text)
    await publisher.stop()
    assert "enable_iter_perf_stats" in caplog.text
