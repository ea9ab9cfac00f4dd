"""What a request's tree has in it, in each order; and that a slow place is found in it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.clock import Clock
from tests.support.handling import collect, request, until
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import FakeContext, RecordingStageClient
from tests.support.tracing import Batches, names_below, tracer_into
from tests.support.trying import logged
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engines.embedded.api.perf_metrics import TimingMetrics
from trtllm_disagg.engines.recording.llm import LLM, Script
from trtllm_disagg.errors import DisaggError, PeerUnavailableError
from trtllm_disagg.handlers.local import LocalDecode, LocalPrefill
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.handlers.trace import REQUEST_TRACE_PREFIX
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.trace.reading import Node, Trace, read_traces
from trtllm_disagg.tracing.spans import RequestClock
from trtllm_disagg.tracing.trace_file import TraceFile
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

pytestmark = pytest.mark.usefixtures("no_leaks")


def alone() -> Generate:
    """A worker alone. It puts together what an engine gives at once: this one takes steps."""
    engine = recording_engine(recording={"step_seconds": 0.005})
    return build_generate(WorkerConfig(model="org/model"), engine, RecordingStageClient())


class Traced:
    """Both workers of an order, each with a file of spans as `up` gives it one."""

    def __init__(
        self, strategy: str, run_dir: Path, error: DisaggError | None = None, **settings: Any
    ) -> None:
        """With `error` the second stage answers with it."""
        (run_dir / "traces").mkdir()
        self._run_dir = run_dir
        self._settings = settings
        self._files: list[TraceFile] = []
        self.engines: dict[Role, LLM] = {}
        self._endpoint: str | None = None
        entry = spec_of(strategy).entry_role
        other = next(role for role in (Role.PREFILL, Role.DECODE) if role != entry)
        serves = None if error is not None else self._worker(other, strategy, RecordingStageClient())
        self.client = RecordingStageClient(serves, error=error)
        self.generate = self._worker(Role(entry or Role.AGG), strategy, self.client)

    def _worker(self, role: Role, strategy: str, client: RecordingStageClient) -> Generate:
        # With this runtime two engines can meet.
        transceiver = {"backend": "NIXL", "transceiver_runtime": "PYTHON"}
        engine = recording_engine(cache_transceiver_config=transceiver)
        client.description["ctx_info_endpoint"] = self._endpoint
        self._endpoint = engine.ctx_info_endpoint
        self.engines[role] = engine.llm
        config = WorkerConfig(model="org/model", role=role, strategy=strategy, **self._settings)
        file = TraceFile(self._run_dir / "traces" / f"{role.value}-0.jsonl", {})
        self._files.append(file)
        return logged(build_generate(config, engine, client), role.value, tracer=tracer_into(file))

    async def trace(self, **keys: Any) -> Trace:
        await collect(self.generate, request(**keys))
        await self.client.idle()
        for file in self._files:
            file.close()
        (trace,) = read_traces(self._run_dir)
        return trace


def node(trace: Trace, name: str) -> Node:
    (found,) = (each for each in trace.nodes if each.span.name == name)
    return found


async def test_prefill_first_is_one_tree_over_both_workers(tmp_path: Path) -> None:
    trace = await Traced("prefill_first", tmp_path).trace()
    (root,) = trace.roots
    assert (root.worker, root.span.name, trace.order) == ("prefill-0", "request", "prefill_first")
    assert names_below(root) == ["decide", "prefill", "handoff", "remote_decode"]
    assert names_below(node(trace, "remote_decode")) == ["select", "dispatch", "relay"]
    stage = node(trace, "decode_stage")
    assert node(trace, "dispatch").children == [stage]
    assert (stage.worker, names_below(stage)) == ("decode-0", ["decode"])
    assert trace.request_ids == ["request-1"]
    assert trace.first_token_ms is not None


async def test_decode_first_is_one_tree_over_both_workers(tmp_path: Path) -> None:
    trace = await Traced("decode_first", tmp_path).trace()
    (root,) = trace.roots
    assert (root.worker, names_below(root)) == ("decode-0", ["decide", "remote_prefill", "handoff", "decode"])
    assert names_below(node(trace, "remote_prefill")) == ["select", "dispatch"]
    stage = node(trace, "prefill_stage")
    assert node(trace, "dispatch").children == [stage]
    assert (stage.worker, names_below(stage)) == ("prefill-0", ["prefill", "handoff"])


async def test_one_worker_alone_has_one_span_for_its_engine() -> None:
    got = Batches()
    await collect(logged(alone(), "agg", tracer=tracer_into(got)), request())
    assert [span.name for span in got.spans] == ["generate", "request"]
    told = got.named("request").attributes
    assert told.pop("gen_ai.latency.time_to_first_token") <= told.pop("gen_ai.latency.e2e")  # type: ignore[operator]
    assert 0 < told.pop("trtllm_disagg.longest_gap") < 5  # type: ignore[operator]
    assert told.pop("trtllm_disagg.longest_gap_after_tokens") in range(2, 5)
    assert told == {
        "gen_ai.request.id": "request-1",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.prompt_tokens": 3,
        "trtllm_disagg.reason": "default",
        "trtllm_disagg.strategy": "agg",
    }


async def test_choices_are_in_the_trace_of_the_first_one() -> None:
    got, engine = Batches(), recording_engine()
    generate = build_generate(WorkerConfig(model="org/model"), engine, RecordingStageClient())
    await collect(logged(generate, "agg", tracer=tracer_into(got)), request(sampling_options={"n": 3}))
    (first,) = [span for span in got.spans if span.name == "request" and span.parent_id is None]
    others = [span for span in got.spans if span.name == "request" and span.parent_id == first.span_id]
    assert len(others) == 2
    assert {span.trace_id for span in got.spans} == {first.trace_id}


async def test_frontends_trace_continues_in_worker_spans_and_engine_headers() -> None:
    got = Batches()
    engine = recording_engine()
    generate = build_generate(WorkerConfig(model="org/model"), engine, RecordingStageClient())
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    asked = msgspec.structs.replace(
        request(), trace_headers={"traceparent": traceparent, "x-request-id": "7"}
    )
    await collect(logged(generate, "agg", tracer=tracer_into(got)), asked)
    root, inner = got.named("request"), got.named("generate")
    assert (root.trace_id, root.parent_id) == ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
    arguments = engine.llm.calls[-1].arguments
    assert arguments["trace_headers"] == {
        "x-request-id": "7",
        "traceparent": f"00-{root.trace_id}-{inner.span_id}-01",
    }
    assert arguments["sampling_params"].return_perf_metrics


async def test_a_request_that_is_not_sampled_leaves_nothing() -> None:
    got = Batches()
    engine = recording_engine()
    generate = build_generate(WorkerConfig(model="org/model"), engine, RecordingStageClient())
    tracer = tracer_into(got, sampler=lambda trace_id, parent: False)
    await collect(logged(generate, "agg", tracer=tracer), request())
    assert got.batches == []
    assert "trace_headers" not in engine.llm.calls[-1].arguments
    assert not engine.llm.calls[-1].arguments["sampling_params"].return_perf_metrics


async def test_fallback_step_is_a_span_with_its_reason(tmp_path: Path) -> None:
    pair = Traced("decode_first", tmp_path, PeerUnavailableError("it is gone"), max_tries=1)
    trace = await pair.trace()
    (root,) = trace.roots
    assert names_below(root) == ["decide", "remote_prefill", "fallback"]
    assert node(trace, "dispatch").span.error == "PeerUnavailableError: it is gone"
    step = node(trace, "fallback")
    assert step.span.attributes == {"to": "local", "because": "it is gone"}
    assert names_below(step) == ["generate"]
    assert [event.name for event in root.span.events] == ["breaker_failure", "first_token"]


async def test_a_client_that_leaves_is_an_event_of_the_request() -> None:
    got = Batches()
    traced = logged(alone(), "agg", tracer=tracer_into(got))
    context = FakeContext()
    chunks = traced(request(max_tokens=50), context)
    await anext(chunks)
    context.stop()
    await chunks.aclose()
    assert [event.name for event in got.named("request").events] == ["first_token", "cancelled"]
    assert got.named("request").events[1].attributes == {"tokens": 1}


#: Two steps of a prompt, of which the last took 0.04 s, by a clock of their own.
CHUNKS = {
    "ctx_chunk_metrics": [
        {"forward_start_time": 5.0, "token_time": 5.05},
        {"forward_start_time": 5.05, "token_time": 5.09},
    ]
}


class SlowEngine:
    """A script of an engine that has taken so many seconds for each of these, one after the other, up to now."""

    def __init__(self, **parts: float) -> None:
        self._parts = parts
        self.gate = asyncio.Semaphore(0)
        self.script = Script(perf_metrics=self, time_breakdown_metrics=CHUNKS, gate=self.gate)

    async def open(self) -> None:
        await asyncio.sleep(sum(self._parts.values()))
        for _ in range(100):
            self.gate.release()

    @property
    def timing_metrics(self) -> TimingMetrics:
        at = time.monotonic() - sum(self._parts.values())
        timing = TimingMetrics(arrival_time=timedelta(seconds=at), kv_cache_size=4096)
        for name, seconds in self._parts.items():
            if name == "kv_cache_transfer_end":
                timing.kv_cache_transfer_start = timedelta(seconds=at)
            at += seconds
            setattr(timing, name, timedelta(seconds=at))
        return timing


QUEUED = SlowEngine(first_scheduled_time=0.6, first_token_time=0.1)
SLOW_LINK = SlowEngine(
    kv_cache_transfer_end=0.6, first_scheduled_time=0.0, first_token_time=0.1, last_token_time=0.1
)


@pytest.mark.parametrize(
    ("strategy", "role", "engine", "slow", "inside"),
    [
        ("decode_first", Role.PREFILL, QUEUED, "engine_queue", ["engine_queue", "compute"]),
        (
            "prefill_first",
            Role.DECODE,
            SLOW_LINK,
            "kv_transfer",
            ["kv_transfer", "first_decode_token", "decode_steps"],
        ),
    ],
    ids=["full prefill queue", "slow link"],
)
async def test_slow_engine_of_the_other_stage_is_the_longest_span(
    strategy: str, role: Role, engine: SlowEngine, slow: str, inside: list[str], tmp_path: Path
) -> None:
    pair = Traced(strategy, tmp_path)
    pair.engines[role].scripts.append(engine.script)
    trace, _ = await asyncio.gather(pair.trace(), engine.open())
    longest, milliseconds = trace.blame[0]
    assert (longest.span.name, longest.worker) == (slow, f"{role.value}-0")
    assert milliseconds > 500
    assert names_below(node(trace, "prefill" if role is Role.PREFILL else "decode")) == inside
    if role is Role.PREFILL:
        assert node(trace, "compute").span.attributes == {"chunks": 2}
        assert names_below(node(trace, "compute")) == ["last_chunk"]
        assert node(trace, "last_chunk").milliseconds == pytest.approx(40, abs=0.1)
        assert node(trace, "last_chunk").span.end == node(trace, "compute").span.end
    else:
        assert node(trace, "kv_transfer").span.attributes["kv_transfer.transport"] == "NIXL"


@pytest.mark.parametrize("is_last", [True, False])
async def test_longest_time_between_two_tokens_is_recorded_with_its_position(
    is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Clock()
    monkeypatch.setattr(RequestClock, "tick", staticmethod(lambda: int(now() * 1e9)))

    async def generate(asked: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        # The way to the first two tokens has spans of its own.
        for seconds in (9.0, 9.0, 0.5, 0.25 if is_last else 0.75, 1.0 if is_last else 0.5):
            now.now += seconds
            yield TokenChunk([1, 2])

    got = Batches()
    await collect(logged(generate, "agg", tracer=tracer_into(got)), request())
    told = got.named("request").attributes
    assert told["trtllm_disagg.longest_gap"] == (1.0 if is_last else 0.75)
    assert told["trtllm_disagg.longest_gap_after_tokens"] == (8 if is_last else 6)


async def test_a_handoff_that_no_decode_took_is_drained_in_a_span_after_the_request() -> None:
    got = Batches()
    root = tracer_into(got).begin("request", "r", None, None)
    asked = msgspec.structs.replace(request(), span=root)
    handoff = await LocalPrefill(recording_engine())(asked, FakeContext())
    root.end()
    LocalDecode(recording_engine(), repeats_first_token=True).drain(asked.with_handoff(handoff))
    await until(lambda: len(got.batches) == 2)
    assert got.named("drain").parent_id == got.named("request").span_id


@pytest.mark.parametrize("strategy", ["prefill_first", "decode_first"])
async def test_phases_that_run_at_once_are_beside_each_other(strategy: str, tmp_path: Path) -> None:
    trace = await Traced(strategy, tmp_path, schedule_style=ScheduleStyle.GENERATION_FIRST).trace()
    (root,) = trace.roots
    assert names_below(root)[:2] == ["decide", "meet"]
    here, there = ("prefill", "decode") if strategy == "prefill_first" else ("decode", "prefill")
    assert here in names_below(root)
    assert there in names_below(node(trace, f"{there}_stage"))


async def test_the_log_line_and_the_span_have_the_same_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    got = Batches()
    generate = build_generate(WorkerConfig(model="org/model"), recording_engine(), RecordingStageClient())
    await collect(logged(generate, "agg", tracer=tracer_into(got)), request())
    (line,) = (
        said for record in caplog.records if (said := record.getMessage()).startswith(REQUEST_TRACE_PREFIX)
    )
    entry = json.loads(line.removeprefix(REQUEST_TRACE_PREFIX))
    root = got.named("request")
    assert [entry["start"], entry["first_chunk"], entry["end"]] == [
        at / 1e9 for at in (root.start, root.events[0].at, root.end)
    ]
    assert root.attributes["gen_ai.latency.e2e"] == (root.end - root.start) / 1e9
