"""One tree of spans a request and worker; of a request that is not traced, nothing; and what that costs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from typing import Any

import pytest

from tests.support.handling import ORDERS, collect, request
from tests.support.recording_pair import make_pair
from tests.support.stage_client import FakeContext
from tests.support.tracing import Batches
from tests.support.trying import logged
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tracing.spans import NO_SPAN, Attributes, Recording, Span, TraceParent, trace_id_of
from trtllm_disagg.tracing.tracer import Limit, Tracer, sampler_of

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


# -- which requests are traced: as OpenTelemetry and Dynamo read the same variables


YES, NO = (TraceParent(TRACE_ID, "00f067aa0ba902b7", sampled) for sampled in (True, False))


@pytest.mark.parametrize(
    ("variables", "alone", "below_yes", "below_no"),
    [
        ({}, True, True, False),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, True, True, True),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, False, False, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, False, True, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, False, False, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio"}, True, True, True),
        ({"OTEL_TRACES_SAMPLE_RATIO": "0"}, False, True, False),
        ({"OTEL_TRACES_SAMPLER": "always_on", "OTEL_TRACES_SAMPLE_RATIO": "0"}, True, True, True),
    ],
)
def test_sampler_decision_for_each_otel_setting_and_parent(
    variables: dict[str, str], alone: bool, below_yes: bool, below_no: bool
) -> None:
    sampler = sampler_of(variables)
    assert [sampler(TRACE_ID, parent) for parent in (None, YES, NO)] == [alone, below_yes, below_no]


def test_ratio_sampler_chooses_the_ids_that_opentelemetrys_does() -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    ours = sampler_of({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.3"})
    theirs = TraceIdRatioBased(0.3)
    ids = [secrets.token_hex(16) for _ in range(1000)]
    chosen = [each for each in ids if ours(each, None)]
    sampled = Decision.RECORD_AND_SAMPLE
    assert chosen == [i for i in ids if theirs.should_sample(None, int(i, 16), "request").decision is sampled]
    assert 0 < len(chosen) < 1000


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG"),
        ({"OTEL_TRACES_SAMPLE_RATIO": "1%"}, "OTEL_TRACES_SAMPLE_RATIO"),
    ],
)
def test_invalid_sampler_variable_is_refused_by_name(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{named}\b.*expected"):
        sampler_of(variables)


# -- how many requests `up` traces


def a_second_of(limit: Limit, clock: list[float], ids: list[str]) -> list[str]:
    clock[0] += 1
    return [each for each in ids if limit.takes(each)]


def test_a_limit_takes_all_of_few_requests_and_a_part_of_many_by_their_ids() -> None:
    clock = [0.0]
    limit, other = (Limit(4, lambda: clock[0]) for _ in range(2))
    few, many = ([trace_id_of(f"request-{n}") for n in range(count)] for count in (4, 640))
    assert a_second_of(limit, clock, few) == few
    # Of a burst all: how many come is known a second later.
    assert a_second_of(limit, clock, many) == many
    part = a_second_of(limit, clock, many)
    assert 0 < len(part) < 20
    # Another worker, which sees a little less, takes the same ones, or twice as many with those among them.
    a_second_of(other, clock, many[:500])
    assert set(part) <= set(a_second_of(other, clock, many)) | set(a_second_of(limit, clock, many))
    clock[0] += 5
    assert a_second_of(limit, clock, many) == many


def test_of_requests_beyond_the_limit_the_slowest_of_each_second_and_failures_leave_their_own_span() -> None:
    clock, received = [0.0], Batches()
    limit = Limit(1, lambda: clock[0])
    tracer = Tracer([received], limit=limit)
    assert [tracer.wants_end(took, None) for took in (3, 2, 3, 5)] == [True, False, False, True]
    assert tracer.wants_end(1, ValueError())
    clock[0] = 1.0
    assert tracer.wants_end(2, None)
    assert not Tracer([received]).wants_end(9, ValueError())


async def test_a_worker_of_a_traced_request_traces_it_whatever_its_own_limit_is() -> None:
    clock, received = [0.0], Batches()
    tracer = Tracer([received], limit=Limit(1, lambda: clock[0]))
    ids = [trace_id_of(f"request-{n}") for n in range(400)]
    for clock[0] in (1.0, 2.0):
        begun = [tracer.begin("decode_stage", None, f"00-{each}-00f067aa0ba902b7-01", None) for each in ids]
        assert all(span.is_recording for span in begun)
        alone = [tracer.begin("request", str(number), None, None).is_recording for number in range(400)]
    assert 0 < sum(alone) < 100


async def test_a_request_beyond_the_limit_costs_no_span_and_the_slowest_one_is_kept() -> None:
    clock, received = [0.0], Batches()
    tracer = Tracer([received], limit=Limit(1, lambda: clock[0]))
    generate = logged(make_pair("prefill_first").generate, "first", tracer=tracer)
    for number in range(64):
        await collect(generate, request(), FakeContext(f"request-{number}"))
    clock[0], received.batches = 1.0, []
    for number in range(64):
        await collect(generate, request(), FakeContext(f"request-{number}"))
    whole = [batch for batch in received.batches if len(batch) > 1]
    ends = [batch for batch in received.batches if len(batch) == 1]
    assert len(whole) < 10
    assert 0 < len(ends) < 32
    (end,) = ends[-1]
    assert end.name == "request"
    assert end.attributes["trtllm_disagg.strategy"] == "prefill_first"
    assert end.end > end.start


# -- what it costs: so many calls a request, and none for a token


class CountedSpan(Span):
    """Each use of a span, of a request that is traced or not."""

    def __init__(self, uses: Counter[str], *, is_recording: bool) -> None:
        self._uses = uses
        self.is_recording = is_recording

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "_uses")[name] += 1
        return object.__getattribute__(self, name)

    def child(self, name: str, attributes: Attributes = {}) -> Span:  # noqa: B006
        return self


class CountingTracer(Tracer):
    def __init__(self, *, is_recording: bool) -> None:
        super().__init__()
        self.uses: Counter[str] = Counter()
        self._is_recording = is_recording

    def begin(self, *_: object, **__: object) -> Span:
        return CountedSpan(self.uses, is_recording=self._is_recording)


@pytest.mark.parametrize("is_recording", [True, False])
@pytest.mark.parametrize("strategy", ORDERS)
async def test_span_operations_do_not_grow_with_the_answer(strategy: str, is_recording: bool) -> None:
    uses = []
    for max_tokens in (150, 400):
        tracer = CountingTracer(is_recording=is_recording)
        generate = logged(make_pair(strategy).generate, "first", tracer=tracer)
        chunks = await collect(generate, request(max_tokens))
        assert sum(len(chunk.token_ids) for chunk in chunks) == max_tokens
        uses.append(tracer.uses)
    assert uses[0] == uses[1]
    assert (uses[0]["child"] > 3) is is_recording


async def test_a_request_that_is_not_traced_has_one_span_for_all_of_it() -> None:
    asked = request()
    await collect(logged(make_pair("prefill_first").generate, "first"), asked)
    assert asked.trace.root is NO_SPAN
    assert asked.within(NO_SPAN) is asked
    recorded = Recording("0" * 31 + "1", lambda spans: None).root("request", None)
    assert asked.within(recorded).span is recorded
