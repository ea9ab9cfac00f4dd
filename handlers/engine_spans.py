"""Spans of phases that run on this worker's engine, and below them spans from the engine's own measurements."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import RequestOutput
from trtllm_disagg.handlers.streams import PerRequestStream
from trtllm_disagg.handlers.trace import ENGINE_TIMES, timing_of
from trtllm_disagg.kv_transfer.handle import split_endpoint
from trtllm_disagg.tracing.spans import NO_SPAN, Span
from trtllm_disagg.types import GenerateRequest, TokenChunk

Phase = Callable[[GenerateRequest], AsyncGenerator[TokenChunk, None]]


def spanned(name: str, request: GenerateRequest, stream: Phase) -> AsyncGenerator[TokenChunk, None]:
    """`stream` within a span of this name; `stream` itself for a request that is not traced."""
    return Spanned(name, request, stream) if request.span.is_recording else stream(request)


class Spanned(PerRequestStream[TokenChunk]):
    """A stream with a span from its first read until it is closed."""

    def __init__(self, name: str, request: GenerateRequest, stream: Phase) -> None:
        self._name = name
        self._request = request
        self._stream = stream
        self._span = NO_SPAN

    async def _first(self) -> TokenChunk:
        self._span = self._request.span.child(self._name)
        self._rest = self._stream(self._request.within(self._span))
        try:
            return await anext(self._rest)
        except Exception as error:
            self._span.end(error)
            raise

    async def _finish(self) -> None:
        self._span.end()


def record_engine(engine: Engine, request: GenerateRequest, result: RequestOutput) -> None:
    """Add the engine's times of a finished RequestOutput as spans below the request's span: waiting, KV transfer,
    computing. Without measurements nothing is added.
    """
    span = request.span
    if not span.is_recording:
        return
    timing = timing_of(result)
    if timing is None:
        return
    times = _Times(*(getattr(timing, name).total_seconds() * engine.time_scale for name in ENGINE_TIMES))
    if times.has_fetched:
        _record_transfer(span, times, timing.kv_cache_size, engine.kv_transport, _link(request))
    ready_at = max(times.arrival, times.fetched) if times.has_fetched else times.arrival
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
    """`ENGINE_TIMES` in seconds of one clock; 0: the request did not come that far."""

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
    """The span of the prompt's steps. The last of several has a span of its own: only it may complete the KV."""
    breakdown = getattr(result, "time_breakdown_metrics", None) or {}
    chunks = breakdown.get("ctx_chunk_metrics") or []
    compute = span.measured("compute", begin, end, {"chunks": len(chunks) or None})
    span.note({"gen_ai.latency.time_in_model_prefill": end - begin})
    last = chunks[-1] if len(chunks) > 1 else {}
    if "token_time" in last:
        # TensorRT-LLM takes these times from another clock than the others.
        seconds = (last["token_time"] - last["forward_start_time"]) * time_scale
        compute.measured("last_chunk", end - seconds, end)


_THIS_HOST = "this host"


def _link(request: GenerateRequest) -> str | None:
    """The host that the KV came from; None where the handoff does not name it."""
    rendezvous, handoff = request.rendezvous, request.prefill_result
    endpoint = rendezvous.ctx_info_endpoint if rendezvous is not None else None
    if handoff is not None:
        endpoint = handoff.disaggregated_params.get("ctx_info_endpoint")
    place = split_endpoint(str(endpoint))
    if place is None:
        return None
    host, _ = place
    return _THIS_HOST if host.startswith("@") else host
