"""One tree of spans a request and worker; of a request that is not traced, nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.tracing import Batches
from trtllm_disagg.tracing.spans import NO_SPAN, Recording, TraceParent, trace_id_of

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = TraceParent(TRACE_ID, "00f067aa0ba902b7", True)


def test_spans_are_emitted_at_the_roots_end_and_later_ones_alone() -> None:
    got = Batches()
    root = Recording(TRACE_ID, got.take).root("request", PARENT)
    with root.child("prefill", {"instance": "1a", "absent": None}):
        pass
    drain = root.child("drain")
    assert got.batches == []

    root.end()
    assert [[span.name for span in batch] for batch in got.batches] == [["prefill", "request"]]
    drain.end()
    drain.end()
    assert [len(batch) for batch in got.batches] == [2, 1]

    request, prefill, late = got.named("request"), got.named("prefill"), got.named("drain")
    assert request.parent_id == PARENT.span_id
    assert request.is_remote
    assert prefill.parent_id == late.parent_id == request.span_id
    assert not prefill.is_remote
    assert {span.trace_id for span in got.spans} == {TRACE_ID}
    assert prefill.attributes == {"instance": "1a"}
    assert request.start <= prefill.start <= prefill.end <= request.end <= late.end


def test_exception_in_a_span_is_its_error_and_the_end_of_its_reader_is_not() -> None:
    got = Batches()
    root = Recording(TRACE_ID, got.take).root("request", None)
    with pytest.raises(ValueError, match="too long"), root.child("dispatch"):
        raise ValueError("too long")
    with pytest.raises(GeneratorExit), root.child("relay"):
        raise GeneratorExit
    with pytest.raises(asyncio.CancelledError), root.child("remote_prefill"):
        raise asyncio.CancelledError
    root.end()
    assert got.named("dispatch").error == "ValueError: too long"
    assert got.named("relay").error is None
    assert got.named("remote_prefill").error is None
    assert got.named("request").parent_id is None


def test_engine_times_are_clipped_to_the_enclosing_span() -> None:
    got = Batches()
    root = Recording(TRACE_ID, got.take).root("request", None)
    now = time.monotonic()
    root.measured("before", now - 50, now - 40)  # the clock of another machine
    root.measured("queue", now - 50, now + 0.0)
    root.measured("backwards", now, now - 1)
    root.measured("compute", now, now + 3600)
    root.end()
    assert [span.name for span in got.spans] in (["compute", "request"], ["queue", "compute", "request"])
    request, compute = got.named("request"), got.named("compute")
    assert request.start <= compute.start < compute.end <= request.end


def test_null_span_has_itself_as_child_and_keeps_headers() -> None:
    given = {"x-request-id": "1"}
    with NO_SPAN.child("prefill", {"instance": "1a"}) as span:
        assert span is NO_SPAN
        span.event("first_token")
        span.note({"a": 1})
        span.measured("queue", 0.0, 1.0)
    assert span.headers(given) is given
    assert span.headers(None) is None
    assert span.traceparent is None
    assert not span.is_recording


def test_an_engine_and_another_worker_go_on_below_the_span() -> None:
    span = Recording(TRACE_ID, Batches().take).root("request", PARENT)
    parent = TraceParent.read(span.traceparent)
    assert parent == TraceParent(TRACE_ID, span.data.span_id, True)
    assert span.headers({"x-request-id": "1", "traceparent": str(PARENT)}) == {
        "x-request-id": "1",
        "traceparent": str(parent),
    }


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "no",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-01",
    ],
)
def test_invalid_traceparent_is_read_as_none(text: str | None) -> None:
    assert TraceParent.read(text) is None
    assert TraceParent.read(str(PARENT)) == PARENT


def test_workers_name_a_request_without_a_trace_context_alike() -> None:
    assert trace_id_of("request-1") == trace_id_of("request-1") != trace_id_of("request-2")
    assert trace_id_of(None) != trace_id_of(None)
    assert TraceParent.read(f"00-{trace_id_of('request-1')}-00f067aa0ba902b7-01") is not None
