"""A phase that runs on this worker's engine, as a span, and what the engine itself measured of it, as parts of that."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import RequestOutput
from trtllm_disagg.handlers.streams import PerRequestStream
from trtllm_disagg.kv_transfer.handle import split_endpoint
from trtllm_disagg.tracing.spans import NO_SPAN, Span
from trtllm_disagg.types import GenerateRequest, TokenChunk

Phase = Callable[[GenerateRequest], AsyncGenerator[TokenChunk, None]]


def spanned(name: str, request: GenerateRequest, stream: Phase) -> AsyncGenerator[TokenChunk, None]:
    """For a request that is not traced no token passes through anything of this."""
    return Spanned(name, request, stream) if request.span.is_recording else stream(request)


class Spanned(PerRequestStream[TokenChunk]):
    """From when the stream is first read until it is closed."""

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
    """The times that the engine tells of a finished RequestOutput, below the request's span, which is around all of it:
    waiting, KV on its way, computing. An engine that measures nothing adds nothing.
    """
    span = request.span
    if not span.is_recording:
        return
    measured = result.outputs[0].request_perf_metrics
    timing = measured.timing_metrics if measured is not None else None
    if timing is None:
        return
    arrival, scheduled, first, last, sent, came = (
        each.total_seconds() * engine.time_scale
        for each in (
            timing.arrival_time,
            timing.first_scheduled_time,
            timing.first_token_time,
            timing.last_token_time,
            timing.kv_cache_transfer_start,
            timing.kv_cache_transfer_end,
        )
    )
    has_come = came > sent
    if has_come:
        seconds, num_bytes = came - sent, timing.kv_cache_size
        told = {
            "kv_transfer.bytes": num_bytes,
            "kv_transfer.gb_per_second": num_bytes / seconds / 1e9,
            "kv_transfer.transport": engine.kv_transport,
            "kv_transfer.link": _link(request),
        }
        span.measured("kv_wait", arrival, sent)
        span.measured("kv_transfer", sent, came, told)
        span.note({"gen_ai.latency.kv_cache_transfer_time": seconds})
    waits_from = max(arrival, came) if has_come else arrival
    if waits_from and scheduled:
        span.measured("engine_queue", waits_from, scheduled)
        span.note({"gen_ai.latency.time_in_queue": max(0.0, scheduled - waits_from)})
    computes_from = max(scheduled, waits_from)
    if computes_from and first > computes_from and has_come:
        span.measured("first_decode_token", computes_from, first)
    elif computes_from and first > computes_from:
        _record_prompt(span, computes_from, first, result, engine.time_scale)
    if first and last > first:
        span.measured("decode_steps", first, last)
        span.note({"gen_ai.latency.time_in_model_decode": last - first})


def _record_prompt(span: Span, begin: float, end: float, result: RequestOutput, time_scale: float) -> None:
    """Of several steps the last one has a span of its own. Only from it on may KV be complete."""
    breakdown = getattr(result, "time_breakdown_metrics", None) or {}
    chunks = breakdown.get("ctx_chunk_metrics") or []
    compute = span.measured("compute", begin, end, {"chunks": len(chunks) or None})
    span.note({"gen_ai.latency.time_in_model_prefill": end - begin})
    last = chunks[-1] if len(chunks) > 1 else {}
    if "token_time" in last:
        # TensorRT-LLM has these times by another clock than the others.
        seconds = (last["token_time"] - last["forward_start_time"]) * time_scale
        compute.measured("last_chunk", end - seconds, end)


_THIS_HOST = "this host"


def _link(request: GenerateRequest) -> str | None:
    """The host that KV came from, where the handoff says it."""
    met, handoff = request.rendezvous, request.prefill_result
    told = met.ctx_info_endpoint if met is not None else None
    if handoff is not None:
        told = handoff.disaggregated_params.get("ctx_info_endpoint")
    place = split_endpoint(str(told))
    if place is None:
        return None
    host, _ = place
    return _THIS_HOST if host.startswith("@") else host
