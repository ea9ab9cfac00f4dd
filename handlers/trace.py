"""Records each request on this worker as a log line and a tree of spans: what was done, why, and when.

The answer's first and last chunk also say what was done and why, and metrics count it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import RequestOutput
from trtllm_disagg.tracing.spans import Attributes, RequestClock, Span
from trtllm_disagg.tracing.trace_file import LONGEST_GAP, LONGEST_GAP_AFTER, SCOPE
from trtllm_disagg.tracing.tracer import Tracer
from trtllm_disagg.types import GenerateRequest, RequestContext, RequestTrace, TokenChunk
from trtllm_disagg.wire.kv_handle import split_endpoint

log = logging.getLogger(__name__)

#: The engine's measurements of a request (`--publish-metrics`), for the answer and /metrics.
KV_TRANSFER_MS = "kv_transfer_ms"
KV_TRANSFER_BYTES = "kv_transfer_bytes"

#: The key of the request trace in `engine_data`.
ENGINE_DATA = "disagg"

#: Dynamo's key of the cache hit in `engine_data` of the last chunk, for its KV router.
KV_CACHE_HIT = "kv_cache_hit"

#: Starts every request's log line.
REQUEST_TRACE_PREFIX = "request_trace "
#: Collects lines for this time to write them together.
_COLLECT_SECONDS = 0.05


def record_decode(engine: Engine, request: GenerateRequest, result: RequestOutput) -> None:
    """Record a finished decode: the engine's times, and the KV transfer's duration and size."""
    timing = _record_times(engine, request, result)
    if timing is None:
        return
    seconds = (timing.kv_cache_transfer_end - timing.kv_cache_transfer_start).total_seconds()
    if seconds > 0:
        request.trace.facts[KV_TRANSFER_MS] = round(seconds * 1000, 3)
        request.trace.facts[KV_TRANSFER_BYTES] = timing.kv_cache_size


def record_prefill(engine: Engine, request: GenerateRequest, result: RequestOutput) -> None:
    """Record a finished prefill, or an answer of one worker: the engine's times, and the number of cached prompt
    tokens.
    """
    _record_times(engine, request, result)
    if result.cached_tokens is not None and not request.is_further_choice:
        reused = result.cached_tokens
        request.trace.cache_hit = {"prompt_tokens": request.num_prompt, "reused_tokens": reused}


#: TensorRT-LLM's timing metrics in the log line; all engines on one machine share a clock.
_ENGINE_TIMES = (
    "arrival_time",
    "first_scheduled_time",
    "first_token_time",
    "last_token_time",
    "kv_cache_transfer_start",
    "kv_cache_transfer_end",
)


def _record_times(engine: Engine, request: GenerateRequest, result: RequestOutput) -> Any:
    """Record the engine's times and return TensorRT-LLM's timing metrics; None if requests are not measured."""
    request.trace.measured = result.metrics_dict
    measured = result.outputs[0].request_perf_metrics
    timing = measured.timing_metrics if measured is not None else None
    if timing is not None:
        times = {name: getattr(timing, name, None) for name in _ENGINE_TIMES}
        request.trace.engine_times = {name: time.total_seconds() for name, time in times.items() if time}
        if request.span.is_recording:
            _record_spans(engine, request, result, timing)
    return timing


def _record_spans(engine: Engine, request: GenerateRequest, result: RequestOutput, timing: Any) -> None:
    """The engine's times as spans below the request's span: waiting, KV transfer, computing."""
    span = request.span
    times = _Times(*(getattr(timing, name).total_seconds() * engine.time_scale for name in _ENGINE_TIMES))
    if times.has_fetched:
        _record_transfer(span, times, timing.kv_cache_size, engine.kv_transport, _link(request))
    ready_at = max(times.arrival, times.fetched) if times.has_fetched else times.arrival
    for encode in (getattr(result, "time_breakdown_metrics", None) or {}).get("encode_metrics", ()):
        ready_at = encode["encode_end_time"] * engine.time_scale
        span.measured("encode", encode["encode_start_time"] * engine.time_scale, ready_at)
    if ready_at and times.scheduled:
        span.measured("engine_queue", ready_at, times.scheduled)
        span.note({"gen_ai.latency.time_in_queue": max(0.0, times.scheduled - ready_at)})
    computing_since = max(times.scheduled, ready_at)
    if computing_since and times.first_token > computing_since:
        if times.has_fetched:
            span.measured("first_decode_token", computing_since, times.first_token)
        else:
            _record_prompt(span, computing_since, times.first_token, result, engine.time_scale)
    if times.first_token and times.last_token > times.first_token:
        span.measured("decode_steps", times.first_token, times.last_token)
        span.note({"gen_ai.latency.time_in_model_decode": times.last_token - times.first_token})


class _Times(NamedTuple):
    """`_ENGINE_TIMES` in seconds of one clock; 0: not reached."""

    arrival: float
    scheduled: float
    first_token: float
    last_token: float
    fetch_began: float
    fetched: float

    @property
    def has_fetched(self) -> bool:
        return self.fetched > self.fetch_began


def _record_transfer(
    span: Span, times: _Times, num_bytes: int, transport: str | None, link: str | None
) -> None:
    seconds = times.fetched - times.fetch_began
    notes = {
        "kv_transfer.bytes": num_bytes,
        "kv_transfer.gb_per_second": num_bytes / seconds / 1e9,
        "kv_transfer.transport": transport,
        "kv_transfer.link": link,
    }
    span.measured("kv_wait", times.arrival, times.fetch_began)
    span.measured("kv_transfer", times.fetch_began, times.fetched, notes)
    span.note({"gen_ai.latency.kv_cache_transfer_time": seconds})


def _record_prompt(span: Span, begin: float, end: float, result: RequestOutput, time_scale: float) -> None:
    """The span of the prompt's steps. The last step has its own: only it may complete the KV."""
    breakdown = getattr(result, "time_breakdown_metrics", None) or {}
    chunks = breakdown.get("ctx_chunk_metrics") or []
    compute = span.measured("compute", begin, end, {"chunks": len(chunks) or None})
    span.note({"gen_ai.latency.time_in_model_prefill": end - begin})
    last = chunks[-1] if len(chunks) > 1 else {}
    if "token_time" in last:
        # TensorRT-LLM takes these times from another clock.
        seconds = (last["token_time"] - last["forward_start_time"]) * time_scale
        compute.measured("last_chunk", end - seconds, end)


_THIS_HOST = "this host"


def _link(request: GenerateRequest) -> str | None:
    """The host that the KV came from; None if the handoff does not name it."""
    rendezvous, handoff = request.rendezvous, request.prefill_result
    endpoint = rendezvous.ctx_info_endpoint if rendezvous is not None else None
    if handoff is not None:
        endpoint = handoff.disaggregated_params.get("ctx_info_endpoint")
    place = split_endpoint(str(endpoint))
    if place is None:
        return None
    host, _ = place
    return _THIS_HOST if host.startswith("/") else host


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """An ended request, for metrics. Times are in seconds since its arrival; None: no such chunk."""

    request: GenerateRequest
    num_tokens: int
    #: The client left before the end.
    is_aborted: bool
    seconds: float
    first_chunk: float | None = None
    second_chunk: float | None = None

    @property
    def trace(self) -> RequestTrace:
        return self.request.trace

    @property
    def phase(self) -> str:
        """`whole`, or the phase that a peer asked for."""
        asked = self.request.phase_request
        return "whole" if asked is None else asked.phase

    @property
    def transfer(self) -> tuple[float, int] | None:
        """(seconds, bytes) of the KV transfer to this worker; None if not measured."""
        facts = self.trace.facts
        return (facts[KV_TRANSFER_MS] / 1000, facts[KV_TRANSFER_BYTES]) if KV_TRANSFER_MS in facts else None


class RequestSink(Protocol):
    """Counts requests."""

    def ended(self, end: RequestEnd) -> None: ...


#: Writes the log line of an ended request.
Write = Callable[[dict[str, Any]], None]


def write_line(entry: dict[str, Any]) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s%s", REQUEST_TRACE_PREFIX, msgspec.json.encode(entry).decode())


class LinesTogether:
    """Collects log lines briefly and writes them together: a single line between other requests' tokens takes about 100
    us of CPU. A killed worker loses its last lines.
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []

    def write(self, entry: dict[str, Any]) -> None:
        if not self._entries:
            asyncio.get_running_loop().call_later(_COLLECT_SECONDS, self.flush)
        self._entries.append(entry)

    def flush(self) -> None:
        entries, self._entries = self._entries, []
        for entry in entries:
            write_line(entry)


@dataclass(slots=True)
class RequestLog:
    """Records every request of this worker."""

    #: Worker role and current strategy, for the log line.
    part: Callable[[], str] = lambda: ""
    #: May be extended later.
    sinks: list[RequestSink] = field(default_factory=list)
    tracer: Tracer = field(default_factory=Tracer)
    write: Write = write_line

    def begin(self, request: GenerateRequest, context: RequestContext) -> RequestRecord:
        """Begin a request's record and its span on this worker."""
        clock = RequestClock()
        request.trace.root = self.begin_span(request, context, clock)
        return RequestRecord(request, context, self, clock)

    def begin_span(
        self,
        request: GenerateRequest,
        context: RequestContext,
        clock: RequestClock,
        *,
        is_limited: bool = True,
    ) -> Span:
        asked, headers = request.phase_request, request.trace_headers
        name = "request" if asked is None or asked.phase == "whole" else f"{asked.phase}_stage"
        return self.tracer.begin(
            name, context.id(), request.traceparent, headers, clock, is_limited=is_limited
        )


class RequestRecord:
    """Records one request. Its log line has the span's times, in seconds since the epoch, so that logs of several
    processes on one machine can be merged.
    """

    def __init__(
        self, request: GenerateRequest, context: RequestContext, log: RequestLog, clock: RequestClock
    ) -> None:
        self._request = request
        self._context = context
        self._log = log
        self._part = log.part()
        self._clock = clock
        #: Gets every chunk, and returns it or a replacement.
        self.on_chunk = self._on_timed_chunk if request.trace.root.is_recording else self._on_chunk
        #: When the first two chunks came.
        self._times: list[int] = []
        self._lacks_times = True
        self._num_tokens = 0
        self._finish_reason: str | None = None
        #: The request trace in the last chunk.
        self._trace: dict[str, Any] = {}
        #: The longest gap between chunks after the first two, in ticks, and the number of tokens before it.
        self._longest_gap = self._tokens_before_gap = 0
        self._tick = clock.tick
        self._last_chunk_at = 0

    def _on_timed_chunk(self, chunk: TokenChunk) -> TokenChunk:
        # Hot: runs per token.
        now = self._tick()
        if now - self._last_chunk_at > self._longest_gap and not self._lacks_times:
            self._longest_gap, self._tokens_before_gap = now - self._last_chunk_at, self._num_tokens
        self._last_chunk_at = now
        return self._on_chunk(chunk)

    def _on_chunk(self, chunk: TokenChunk) -> TokenChunk:
        self._num_tokens += len(chunk.token_ids)
        if self._lacks_times:
            self._times.append(self._clock.now())
            self._lacks_times = len(self._times) < 2
            if self._lacks_times:
                self._request.trace.root.event("first_token", at=self._times[0])
        elif chunk.finish_reason is None:
            return chunk
        self._finish_reason = chunk.finish_reason or self._finish_reason
        # Only the last chunk's trace is complete, but the frontend does not read it after a stop string.
        if self._lacks_times or chunk.finish_reason is not None:
            self._trace = self._request.trace.to_json()
            return _with_trace(chunk, self._request.trace, self._trace)
        return chunk

    def end(self, error: BaseException | None) -> None:
        if self._finish_reason is None or error is not None:
            self._trace = self._request.trace.to_json()
        is_aborted = self._finish_reason is None and self._context.is_stopped()
        if is_aborted and self._num_tokens and self._request.may_end_at_frontend:
            is_aborted, self._finish_reason = False, "ended_by_frontend"
        now = self._clock.now()
        since_start = [(at - self._clock.start) / 1e9 for at in (now, *self._times)]
        end = RequestEnd(self._request, self._num_tokens, is_aborted, *since_start)
        for sink in self._log.sinks:
            try:
                sink.ended(end)
            except Exception:
                # The client has its answer; only metrics lack it.
                log.exception("request %s: recording its metrics failed", self._context.id())
        entry = {
            "request": self._context.id(),
            "part": self._part,
            "prompt_tokens": self._request.num_prompt,
            "tokens": self._num_tokens,
            "finish_reason": self._finish_reason,
            "start": self._clock.start / 1e9,
            "first_chunk": self._times[0] / 1e9 if self._times else None,
            "second_chunk": self._times[1] / 1e9 if len(self._times) > 1 else None,
            "end": now / 1e9,
        }
        parts = {"disagg": self._trace, "engine": self._request.trace.engine_times}
        self._log.write(entry | {name: values for name, values in parts.items() if values})
        self._end_span(error, now, end)

    def _end_span(self, error: BaseException | None, now: int, end: RequestEnd) -> None:
        root = self._request.trace.root
        if not root.is_recording and self._log.tracer.wants_end(now - self._clock.start, error):
            root = self._log.begin_span(self._request, self._context, self._clock, is_limited=False)
        if not root.is_recording:
            return
        if end.is_aborted:
            root.event("cancelled", {"tokens": self._num_tokens}, at=now)
        root.note(_attributes(self._request, self._context.id(), self._trace))
        root.note(
            {
                "gen_ai.usage.completion_tokens": self._num_tokens,
                "gen_ai.latency.time_to_first_token": end.first_chunk,
                "gen_ai.latency.e2e": end.seconds,
                "gen_ai.response.finish_reasons": [self._finish_reason] if self._finish_reason else None,
            }
        )
        if self._longest_gap:
            root.note({LONGEST_GAP: self._longest_gap / 1e9, LONGEST_GAP_AFTER: self._tokens_before_gap})
        root.end(error, at=now)


def _attributes(request: GenerateRequest, request_id: str | None, trace: dict[str, Any]) -> Attributes:
    """Attributes named by the generative-AI conventions, as on TensorRT-LLM's own spans; ours have our prefix."""
    sampling = request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.max_tokens": request.stop.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.usage.prompt_tokens": request.num_prompt,
    }
    return attributes | {f"{SCOPE}.{name}": value for name, value in trace.items()}


def _with_trace(chunk: TokenChunk, trace: RequestTrace, known: dict[str, Any]) -> TokenChunk:
    """The chunk with the trace in `engine_data`, which clients get with `nvext.extra_fields: ["engine_data"]`."""
    data = dict(chunk.engine_data or {})
    # Another worker's hit does not matter: the router chose this worker.
    data.pop(KV_CACHE_HIT, None)
    if chunk.finish_reason is not None and trace.cache_hit is not None:
        data[KV_CACHE_HIT] = trace.cache_hit
    if known:
        data[ENGINE_DATA] = data.get(ENGINE_DATA, {}) | known
    return msgspec.structs.replace(chunk, engine_data=data) if data else chunk
