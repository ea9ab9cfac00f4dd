"""The engine's statistics become the router's load, what /metrics shows, and what the Planner reads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dynamo.common.forward_pass_metrics import decode
from dynamo.llm import FpmDirectPublisher, FpmEventSubscriber
from dynamo.runtime import DistributedRuntime

from tests.support.clock import Clock
from tests.support.sinks import RecordingLoadSink, RecordingStatsSink
from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import DynamoMetrics, EngineMetrics, registry_of
from trtllm_disagg.dynamo_runtime.publishers import NEEDED, SILENT_SECONDS, ForwardPassMetrics, StatsForwarder
from trtllm_disagg.engine.handoffs_held import HandoffsHeld
from trtllm_disagg.engine.readers import Statistics
from trtllm_disagg.tools.up.plan import LOOPBACK


def stat(used: int, rank: int | None = None) -> dict[str, Any]:
    return {"kvCacheStats": {"usedNumBlocks": used}} | ({} if rank is None else {"attentionDpRank": rank})


class Published:
    """A forwarder in a role term, and what it was handed."""

    def __init__(self, **settings: Any) -> None:
        self.statistics = Statistics()
        self.load, self.metrics = RecordingLoadSink(), RecordingStatsSink()
        self.publisher = StatsForwarder(self.statistics, self.load, self.metrics, **settings)
        self.statistics.subscribe(self.publisher)


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
def test_the_router_gets_the_newest_of_each_rank_and_the_metrics_get_all(
    stats: list[dict[str, Any]], loads: list[tuple[int | None, int]]
) -> None:
    published = Published()
    published.statistics.receive(stats)
    assert published.load.loads == loads
    assert published.metrics.stats == stats


async def test_empty_load_is_published_at_the_start_and_nothing_behind_the_end() -> None:
    statistics, load = Statistics(), RecordingLoadSink()
    publisher = StatsForwarder(statistics, load)
    await publisher.start()
    statistics.receive([stat(9)])
    await publisher.stop()
    statistics.receive([stat(7)])
    assert load.loads == [(None, 0), (None, 9)]


def test_an_engine_without_requests_that_takes_no_steps_for_long_has_no_load() -> None:
    """TensorRT-LLM tells in its next step what was freed since the last one, and a router may send it none before."""
    clock = Clock()
    published = Published(num_ranks=2, clock=clock)
    receive, loads = published.statistics.receive, published.load.loads
    receive([stat(90, 0), stat(80, 1)])
    clock.now += SILENT_SECONDS - 0.1
    receive([])
    assert loads == [(0, 90), (1, 80)]
    clock.now += 0.1
    for _ in range(2):
        receive([])
    assert loads[2:] == [(0, 0), (1, 0)]
    receive([stat(70, 1)])
    clock.now += SILENT_SECONDS
    receive([])
    assert loads[4:] == [(1, 70), (0, 0), (1, 0)]


def test_an_engine_that_hangs_with_requests_keeps_its_load_until_they_have_gone() -> None:
    clock, rests = Clock(), list[float]()
    requests = {"one"}
    published = Published(
        has_requests=lambda: bool(requests), on_idle=lambda: rests.append(clock.now), clock=clock
    )
    published.statistics.receive([stat(90, 0)])
    for _ in range(3):
        clock.now += SILENT_SECONDS
        published.statistics.receive([])
    assert (published.load.loads, rests) == ([(0, 90)], [])
    requests.clear()
    clock.now += SILENT_SECONDS
    published.statistics.receive([])
    assert published.load.loads == [(0, 90), (None, 0)]
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
        metrics.show_idle()
    pages = (registry_of(of_engine), of_dynamo.registry)
    values = {each.name: each.value for page in pages for metric in page.collect() for each in metric.samples}
    names = ("trtllm_disagg_kv_blocks_used", "trtllm_disagg_requests_active")
    assert [values[name] for name in (*names, "dynamo_component_gpu_cache_usage_percent")] == shown


# -- as Dynamo's Planner reads them


BATCH = {name: 10 + number for number, name in enumerate(sorted(NEEDED))}


def iteration(**changes: Any) -> dict[str, Any]:
    return {"iterLatencyMS": 250.0, "inflightBatchingStats": BATCH} | changes


class RecordingSteps:
    def __init__(self) -> None:
        self.published: list[dict[str, float]] = []
        self.num_ends = 0

    def publish(self, **values: float) -> None:
        self.published.append(values)

    def shutdown(self) -> None:
        self.num_ends += 1


async def test_dynamos_subscriber_reads_what_the_engine_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", LOOPBACK)
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    try:
        endpoint = runtime.endpoint("planned.prefill.generate")
        metrics = ForwardPassMetrics(FpmDirectPublisher(endpoint, "77", 2))
        subscriber = FpmEventSubscriber(endpoint)
        receiving = asyncio.create_task(asyncio.to_thread(subscriber.recv))
        # A subscriber hears nothing of before it was there; an idle worker says so each second.
        async with asyncio.timeout(20):
            await receiving
            metrics.update(iteration(attentionDpRank=1))
            while not (read := decode(await asyncio.to_thread(subscriber.recv))).wall_time:
                pass
        subscriber.shutdown()
        await metrics.stop()
    finally:
        runtime.shutdown()

    assert (read.worker_id, read.dp_rank, read.wall_time) == ("77", 1, 0.25)
    scheduled, queued = read.scheduled_requests, read.queued_requests
    assert scheduled.num_prefill_requests == BATCH["numContextRequests"]
    assert scheduled.sum_prefill_tokens == BATCH["numCtxTokens"]
    assert scheduled.sum_prefill_kv_tokens == BATCH["numCtxKvTokens"]
    assert scheduled.num_decode_requests == BATCH["numGenRequests"]
    assert scheduled.sum_decode_kv_tokens == BATCH["numGenKvTokens"]
    assert queued.num_prefill_requests == BATCH["numQueuedContextRequests"]
    assert queued.sum_prefill_tokens == BATCH["numQueuedCtxTokens"]
    assert queued.num_decode_requests == BATCH["numPausedRequests"] + BATCH["numQueuedGenRequests"]
    assert queued.sum_decode_kv_tokens == BATCH["numPausedKvTokens"] + BATCH["numQueuedGenKvTokens"]


def test_the_statistics_that_are_read_are_those_of_upstreams_worker() -> None:
    publisher = pytest.importorskip("dynamo.trtllm.publisher")
    assert set(publisher._FPM_REQUIRED_IBS_FIELDS) == NEEDED


@pytest.mark.parametrize("batch", [None, {}, {name: 1 for name in NEEDED if name != "numCtxKvTokens"}])
def test_statistics_that_lack_a_number_end_the_metrics_with_one_warning(
    batch: dict[str, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    steps = RecordingSteps()
    metrics = ForwardPassMetrics(steps)
    metrics.update(iteration())
    for _ in range(3):
        metrics.update(iteration(inflightBatchingStats=batch))
    metrics.update(iteration())
    assert len(steps.published) == steps.num_ends == len(caplog.records) == 1
    assert "lack" in caplog.text
    assert "numCtxKvTokens" in caplog.text


@pytest.mark.parametrize(
    ("argv", "environ", "published"),
    [
        ([], {}, False),
        (["--publish-metrics"], {}, True),
        (["--publish-forward-pass-metrics"], {}, True),
        (["--fpm-trace"], {}, True),
        (["--no-fpm-trace"], {"DYN_FPM_TRACE": "1"}, False),
        ([], {"DYN_FPM_TRACE": "true"}, True),
        ([], {"DYN_FPM_TRACE": "0"}, False),
        ([], {"DYN_FORWARDPASS_METRIC_PORT": "20380"}, True),
        (["--no-publish-forward-pass-metrics"], {"DYN_FORWARDPASS_METRIC_PORT": "20380"}, False),
    ],
)
def test_iter_perf_stats_are_on_only_when_metrics_are_published(
    argv: list[str], environ: dict[str, str], published: bool
) -> None:
    config = parse_worker_args(["--model", "org/name", "--engine", "tensorrt_llm", *argv], environ)
    assert config.reads_statistics is published
    assert build_engine_args(config)["enable_iter_perf_stats"] is published
