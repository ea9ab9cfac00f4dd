"""How long a request's KV took to come: told with the answer, in the log, and on /metrics."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from tests.support.handling import collect, request
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import FakeContext
from tests.support.trying import logged
from tests.unit.dynamo_runtime.test_engine_metrics import shown
from trtllm_disagg.dynamo_runtime.request_metrics import RequestMetrics
from trtllm_disagg.engines.embedded.api.perf_metrics import (
    FINISHED_REASON,
    MetricNames,
    RequestPerfMetrics,
    TimingMetrics,
    metrics_dict,
)
from trtllm_disagg.engines.embedded.ipc.messages import Measured
from trtllm_disagg.engines.recording.llm import Script
from trtllm_disagg.handlers.local import LocalDecode, LocalPrefill
from trtllm_disagg.handlers.peers import DECODE
from trtllm_disagg.handlers.trace import ENGINE_DATA, REQUEST_TRACE_PREFIX, RequestSink
from trtllm_disagg.types import Generate, GenerateRequest, Handoff, TokenChunk
from trtllm_disagg.wire.bodies import decode_request, encode_request

CAME = RequestPerfMetrics(
    TimingMetrics(
        kv_cache_transfer_start=timedelta(seconds=20),
        kv_cache_transfer_end=timedelta(seconds=20, milliseconds=12),
        kv_cache_size=4096,
    )
)
NOTHING_CAME = RequestPerfMetrics()


async def prefilled() -> GenerateRequest:
    asked = request(4)
    handoff = await LocalPrefill(recording_engine())(asked, FakeContext())
    return decode_request(encode_request(asked.with_handoff(handoff), DECODE))


def decoder(perf_metrics: Any, sinks: list[RequestSink], *, measures: bool = True) -> Generate:
    engine = recording_engine(enable_iter_perf_stats=measures)
    engine.llm.scripts.append(Script(perf_metrics=perf_metrics))
    phase = LocalDecode(engine, repeats_first_token=True)
    return logged(lambda asked, context: phase(asked, context, Handoff(TokenChunk([]), None)), "x", sinks)


@pytest.mark.usefixtures("no_leaks")
async def test_transfer_time_and_size_are_in_answer_log_and_metrics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="trtllm_disagg.handlers.trace")
    counts = RequestMetrics()
    for _ in range(2):
        chunks = await collect(decoder(CAME, [counts]), await prefilled())

    told = {"kv_transfer_ms": 12.0, "kv_transfer_bytes": 4096}
    assert chunks[-1].engine_data == {ENGINE_DATA: told}
    entry = json.loads(caplog.messages[-1].removeprefix(REQUEST_TRACE_PREFIX))
    assert entry["disagg"] == told
    begin, end = (entry["engine"][f"kv_cache_transfer_{end}"] for end in ("start", "end"))
    assert end - begin == pytest.approx(0.012)
    numbers = shown(counts.registry)
    assert numbers["kv_transfer_seconds_count"] == numbers["kv_transfer_bytes_count"] == 2
    assert numbers["kv_transfer_seconds_sum"] == pytest.approx(0.024)
    assert numbers["kv_transfer_bytes_sum"] == 8192


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("perf_metrics", "measures"),
    [(CAME, False), (NOTHING_CAME, True), (None, True), (RequestPerfMetrics(timing_metrics=None), True)],  # type: ignore[arg-type]
    ids=["unasked", "no transfer", "no measurements", "no times"],
)
async def test_transfer_without_measurement_is_in_no_answer_and_no_metric(
    perf_metrics: Any, measures: bool
) -> None:
    counts = RequestMetrics()
    chunks = await collect(decoder(perf_metrics, [counts], measures=measures), await prefilled())
    assert chunks[-1].engine_data is None
    assert shown(counts.registry)["kv_transfer_seconds_count"] == 0


def test_request_metrics_omit_times_that_did_not_occur() -> None:
    cancelled = Measured(10.0, first_scheduled=10.5)
    assert metrics_dict(cancelled, "cancelled", 0, only_choice=True) == {
        FINISHED_REASON: "cancelled",
        MetricNames.REQUEST_QUEUE_TIME: 0.5,
    }
    one_token = Measured(10.0, first_scheduled=10.5, first_token=11.0, last_token=11.0)
    told = metrics_dict(one_token, "length", 1, only_choice=True)
    assert MetricNames.TPOT not in told
    assert MetricNames.DECODE_TIME not in told
    assert told[MetricNames.GENERATION_TOKENS] == 1
