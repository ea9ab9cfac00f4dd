"""The request trace of each request on this worker, as a log line and a tree of spans: what was done, why, and when.

What was done and why is also in the first and the last chunk of the answer, and counted in metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from trtllm_disagg.engine.llm_api import RequestOutput
from trtllm_disagg.tracing.spans import Attributes, RequestClock, Span
from trtllm_disagg.tracing.trace_file import LONGEST_GAP, LONGEST_GAP_AFTER, SCOPE
from trtllm_disagg.tracing.tracer import Tracer
from trtllm_disagg.types import GenerateRequest, RequestContext, RequestTrace, TokenChunk

log = logging.getLogger(__name__)

#: Facts that the engine measured of a request (`--publish-metrics`), for the answer and /metrics.
KV_TRANSFER_MS = "kv_transfer_ms"
KV_TRANSFER_BYTES = "kv_transfer_bytes"

#: The key of the request trace in `engine_data`.
ENGINE_DATA = "disagg"

#: Dynamo's key of the cache hit in `engine_data` of the last chunk, for its KV router.
KV_CACHE_HIT = "kv_cache_hit"

#: The log line of every request starts with this.
REQUEST_TRACE_PREFIX = "request_trace "
#: Lines are collected for this long and then written together.
_COLLECT_SECONDS = 0.05


def record_transfer(trace: RequestTrace, result: RequestOutput) -> None:
    """Record duration and size of the KV transfer to this worker. `result`: the finished RequestOutput of a decode."""
    timing = _record_times(trace, result)
    if timing is None:
        return
    seconds = (timing.kv_cache_transfer_end - timing.kv_cache_transfer_start).total_seconds()
    if seconds > 0:
        trace.facts[KV_TRANSFER_MS] = round(seconds * 1000, 3)
        trace.facts[KV_TRANSFER_BYTES] = timing.kv_cache_size


def record_cache_hit(request: GenerateRequest, result: RequestOutput) -> None:
    """Record how many prompt tokens were in the engine's cache. `result`: the finished RequestOutput of a prefill."""
    _record_times(request.trace, result)
    if result.cached_tokens is not None:
        reused = result.cached_tokens
        request.trace.cache_hit = {"prompt_tokens": len(request.token_ids), "reused_tokens": reused}


#: The timing metrics of TensorRT-LLM that the log line has; all engines on one machine use the same clock.
ENGINE_TIMES = (
    "arrival_time",
    "first_scheduled_time",
    "first_token_time",
    "last_token_time",
    "kv_cache_transfer_start",
    "kv_cache_transfer_end",
)


def timing_of(result: RequestOutput) -> Any:
    """TensorRT-LLM's timing metrics of a request; None where requests are not measured."""
    measured = result.outputs[0].request_perf_metrics
    return measured.timing_metrics if measured is not None else None


def _record_times(trace: RequestTrace, result: RequestOutput) -> Any:
    """Record the engine's times and return `timing_of(result)`."""
    trace.measured = result.metrics_dict
    timing = timing_of(result)
    if timing is not None:
        times = {name: getattr(timing, name, None) for name in ENGINE_TIMES}
        trace.engine_times = {name: time.total_seconds() for name, time in times.items() if time}
    return timing


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """An ended request on this worker, for metrics. Times are in seconds since its arrival; None: no such chunk."""

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
        """`whole`, or the phase that a worker of the other role asked for."""
        asked = self.request.phase_request
        return "whole" if asked is None else asked.kind

    @property
    def transfer(self) -> tuple[float, int] | None:
        """(seconds, bytes) of the KV transfer to this worker; None where the engine has measured none."""
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
    """Collects log lines for a moment and writes them together. A single line, written between the tokens of other
    requests, takes some 100 us of CPU. A worker that is killed loses the lines of its last moment.
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
    """What every request of this worker is recorded with."""

    #: The worker's role and the strategy in force, for the log line.
    part: Callable[[], str] = lambda: ""
    #: May be extended later.
    sinks: list[RequestSink] = field(default_factory=list)
    tracer: Tracer = field(default_factory=Tracer)
    write: Write = write_line

    def begin(self, request: GenerateRequest, context: RequestContext) -> RequestRecord:
        """A record of this request, with the span around all that the worker does for it."""
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
        name = "request" if asked is None or asked.kind == "whole" else f"{asked.kind}_stage"
        return self.tracer.begin(
            name, context.id(), request.traceparent, headers, clock, is_limited=is_limited
        )


class RequestRecord:
    """Records one request. Its log line has the times of the request's span, in seconds since the epoch, so that logs
    of several processes on one machine can be merged.
    """

    def __init__(
        self, request: GenerateRequest, context: RequestContext, log: RequestLog, clock: RequestClock
    ) -> None:
        self._request = request
        self._context = context
        self._log = log
        self._part = log.part()
        self._clock = clock
        #: Gets every chunk on its way and returns it, or another one in its place.
        self.on_chunk = self._on_timed_chunk if request.trace.root.is_recording else self._on_chunk
        #: When the first two chunks came.
        self._times: list[int] = []
        self._lacks_times = True
        self._num_tokens = 0
        self._finish_reason: str | None = None
        #: What the last chunk says of the request trace.
        self._trace: dict[str, Any] = {}
        #: The longest gap between two chunks after the first two, in ticks, and the number of tokens before it.
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
        # Only the last chunk's trace is complete, but at a stop string the frontend ends the answer without that chunk.
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
        taken = map(self._since_start, (now, *self._times))
        end = RequestEnd(self._request, self._num_tokens, is_aborted, *taken)
        for sink in self._log.sinks:
            try:
                sink.ended(end)
            except Exception:
                # The client has its answer; only the operator has to know that metrics lack it.
                log.exception("request %s: recording its metrics failed", self._context.id())
        entry = {
            "request": self._context.id(),
            "part": self._part,
            "prompt_tokens": len(self._request.token_ids),
            "tokens": self._num_tokens,
            "finish_reason": self._finish_reason,
            "start": self._clock.start / 1e9,
            "first_chunk": self._times[0] / 1e9 if self._times else None,
            "second_chunk": self._times[1] / 1e9 if len(self._times) > 1 else None,
            "end": now / 1e9,
        }
        parts = {"disagg": self._trace, "engine": self._request.trace.engine_times}
        self._log.write(entry | {name: values for name, values in parts.items() if values})
        self._end_span(error, now, is_aborted=is_aborted)

    def _since_start(self, at: int) -> float:
        return (at - self._clock.start) / 1e9

    def _end_span(self, error: BaseException | None, now: int, *, is_aborted: bool) -> None:
        root = self._request.trace.root
        if not root.is_recording and self._log.tracer.wants_end(now - self._clock.start, error):
            root = self._log.begin_span(self._request, self._context, self._clock, is_limited=False)
        if not root.is_recording:
            return
        if is_aborted:
            root.event("cancelled", {"tokens": self._num_tokens}, at=now)
        root.note(_attributes(self._request, self._context.id(), self._trace))
        root.note(
            {
                "gen_ai.usage.completion_tokens": self._num_tokens,
                "gen_ai.latency.time_to_first_token": (
                    self._since_start(self._times[0]) if self._times else None
                ),
                "gen_ai.latency.e2e": self._since_start(now),
                "gen_ai.response.finish_reasons": [self._finish_reason] if self._finish_reason else None,
            }
        )
        if self._longest_gap:
            root.note({LONGEST_GAP: self._longest_gap / 1e9, LONGEST_GAP_AFTER: self._tokens_before_gap})
        root.end(error, at=now)


def _attributes(request: GenerateRequest, request_id: str | None, trace: dict[str, Any]) -> Attributes:
    """Attributes named by the conventions for generative AI, as on TensorRT-LLM's own spans; ours have our prefix."""
    sampling = request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.max_tokens": request.stop.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.usage.prompt_tokens": len(request.token_ids),
    }
    return attributes | {f"{SCOPE}.{name}": value for name, value in trace.items()}


def _with_trace(chunk: TokenChunk, trace: RequestTrace, known: dict[str, Any]) -> TokenChunk:
    """The chunk with the trace in `engine_data`, which clients get with `nvext.extra_fields: ["engine_data"]`."""
    data = dict(chunk.engine_data or {})
    # Another worker's hit is of no use: the router has chosen this worker.
    data.pop(KV_CACHE_HIT, None)
    if chunk.finish_reason is not None and trace.cache_hit is not None:
        data[KV_CACHE_HIT] = trace.cache_hit
    if known:
        data[ENGINE_DATA] = data.get(ENGINE_DATA, {}) | known
    return msgspec.structs.replace(chunk, engine_data=data) if data else chunk
