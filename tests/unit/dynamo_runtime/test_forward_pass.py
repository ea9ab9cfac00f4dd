"""The engine's statistics as Dynamo's Planner reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dynamo.common.forward_pass_metrics import decode
from dynamo.llm import FpmDirectPublisher, FpmEventSubscriber
from dynamo.runtime import DistributedRuntime

from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.dynamo_runtime.publishers import NEEDED, ForwardPassMetrics
from trtllm_disagg.tools.up.plan import LOOPBACK

BATCH = {name: 10 + number for number, name in enumerate(sorted(NEEDED))}


def stat(**changes: Any) -> dict[str, Any]:
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
            metrics.update(stat(attentionDpRank=1))
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
    metrics.update(stat())
    for _ in range(3):
        metrics.update(stat(inflightBatchingStats=batch))
    metrics.update(stat())
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
