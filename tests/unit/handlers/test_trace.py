"""One line in the log per request and worker, whatever became of the request."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.handling import collect, request, until
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import FakeContext
from tests.support.trying import counts_of, logged, trying
from trtllm_disagg.config.thresholds import Live
from trtllm_disagg.engines.recording.llm import RequestError, Script
from trtllm_disagg.errors import EngineError
from trtllm_disagg.handlers import outputs
from trtllm_disagg.handlers.local import LocalAgg
from trtllm_disagg.handlers.trace import REQUEST_TRACE_PREFIX, LinesTogether, RequestEnd, RequestLog
from trtllm_disagg.types import Generate


@pytest.fixture(autouse=True)
def _each_token_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "STEP_SECONDS", -1.0)  # as on an engine that takes time


pytestmark = pytest.mark.usefixtures("no_leaks")


def entries(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    messages = [record.getMessage() for record in caplog.records if record.name.endswith("handlers.trace")]
    assert all(message.startswith(REQUEST_TRACE_PREFIX) for message in messages)
    return [json.loads(message.removeprefix(REQUEST_TRACE_PREFIX)) for message in messages]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="trtllm_disagg.handlers.trace")
    return caplog


async def test_lines_of_requests_that_end_together_are_written_together(
    lines: pytest.LogCaptureFixture,
) -> None:
    together = LinesTogether()
    generate = logged(LocalAgg(recording_engine()), "agg", write=together.write)
    for tokens in (1, 2):
        await collect(generate, request(max_tokens=tokens))
    assert entries(lines) == []
    await until(lambda: entries(lines))
    assert [entry["tokens"] for entry in entries(lines)] == [1, 2]
    await collect(generate, request(max_tokens=3))
    together.flush()  # the worker ends
    assert [entry["tokens"] for entry in entries(lines)] == [1, 2, 3]


def service(script: Script | None = None) -> Generate:
    engine = recording_engine()
    engine.llm.scripts.append(script or Script())
    return logged(LocalAgg(engine), "agg")


async def test_an_answer_passes_unchanged_and_is_noted(lines: pytest.LogCaptureFixture) -> None:
    asked = request(max_tokens=4)
    *answer, last = await collect(service(), asked)
    *same, end = await collect(LocalAgg(recording_engine()), asked)
    assert answer == same
    assert last == msgspec.structs.replace(
        end, engine_data={"kv_cache_hit": {"prompt_tokens": 3, "reused_tokens": 0}}
    )
    (entry,) = entries(lines)
    times = [entry.pop(name) for name in ("start", "first_chunk", "second_chunk", "end")]
    assert times == sorted(times)
    assert entry == {
        "request": "request-1",
        "part": "agg",
        "prompt_tokens": 3,
        "tokens": 4,
        "finish_reason": "length",
    }


async def test_after_a_switch_the_line_has_the_new_strategy(lines: pytest.LogCaptureFixture) -> None:
    strategy = Live("decode_first")
    log = RequestLog(lambda: f"decode/{strategy.value}")
    generate = trying(LocalAgg(recording_engine()), counts=counts_of(log), resumes=False)
    began_before = generate(request(max_tokens=2), FakeContext())
    await anext(began_before)
    strategy.value = "prefill_first"
    await collect(generate, request())
    assert [chunk async for chunk in began_before]
    assert [entry["part"] for entry in entries(lines)] == ["decode/prefill_first", "decode/decode_first"]


async def test_a_short_answer_and_a_failed_one_are_noted(lines: pytest.LogCaptureFixture) -> None:
    await collect(service(), request(max_tokens=1))
    with pytest.raises(EngineError):
        await collect(service(Script(error=RequestError("x"))), request())
    short, failed = entries(lines)
    assert (short["tokens"], short["second_chunk"]) == (1, None)
    assert (failed["tokens"], failed["finish_reason"], failed["first_chunk"]) == (0, None, None)


async def test_a_client_that_left_is_noted_at_once(lines: pytest.LogCaptureFixture) -> None:
    engine = recording_engine()
    chunks = logged(LocalAgg(engine), "agg")(request(), FakeContext())
    await anext(chunks)
    await chunks.aclose()
    (entry,) = entries(lines)
    assert (entry["tokens"], entry["finish_reason"]) == (1, None)
    assert engine.llm.results[0].aborts == [1]


class FaultySink:
    def ended(self, end: RequestEnd) -> None:
        raise ValueError("a counter went backwards")


async def test_a_fault_in_counting_is_logged_and_the_answer_is_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = logged(LocalAgg(recording_engine()), "agg", [FaultySink()])

    chunks = await collect(service, request(max_tokens=3))

    assert sum(len(chunk.token_ids) for chunk in chunks) == 3
    assert "request request-1: recording its metrics failed" in caplog.text


@pytest.mark.parametrize(
    ("looked_for", "reason"),
    [
        ({"stop": ["x"]}, "ended_by_frontend"),
        ({"stop_token_ids_visible": [7]}, "ended_by_frontend"),
        ({}, None),
    ],
)
async def test_an_answer_that_the_frontend_may_have_ended_is_not_cancelled(
    lines: pytest.LogCaptureFixture, looked_for: dict[str, Any], reason: str | None
) -> None:
    """At a stop string it stops the request as if its client had left."""
    ends: list[RequestEnd] = []
    context = FakeContext()
    generate = logged(LocalAgg(recording_engine()), "agg", [SimpleNamespace(ended=ends.append)])
    chunks = generate(request(stop_conditions={"max_tokens": 5} | looked_for), context)
    await anext(chunks)
    context.stop()
    await chunks.aclose()
    assert [entry["finish_reason"] for entry in entries(lines)] == [reason]
    assert [end.is_aborted for end in ends] == [reason is None]
