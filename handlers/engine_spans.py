"""A phase that runs on this worker's engine, as a span, and what the engine itself measured of it, as parts of that."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from trtllm_disagg.handlers.streams import PerRequestStream
from trtllm_disagg.tracing.spans import NO_SPAN, Span
from trtllm_disagg.types import GenerateRequest, TokenChunk


class Spanned(PerRequestStream[TokenChunk]):
    """From when the stream is first read until it is closed."""

    def __init__(
        self,
        name: str,
        request: GenerateRequest,
        stream: Callable[[GenerateRequest], AsyncGenerator[TokenChunk, None]],
    ) -> None:
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


def record_engine(span: Span, result: Any) -> None:
    """The times that the engine tells of a finished RequestOutput: waiting, KV on its way, computing. `span` is around
    all of it. An engine that measures nothing adds nothing.
    """
    if not span.is_recording:
        return
    measured = result.outputs[0].request_perf_metrics
    timing = measured.timing_metrics if measured is not None else None
    if timing is None:
        return
    arrival, scheduled, first, last, sent, came = (
        each.total_seconds()
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
        told = {"kv_transfer.bytes": num_bytes, "kv_transfer.gb_per_second": num_bytes / seconds / 1e9}
        span.measured("kv_wait", arrival, sent)
        span.measured("kv_transfer", sent, came, told)
        span.note({"gen_ai.latency.kv_cache_transfer_time": seconds})
    waits_from = max(arrival, came) if has_come else arrival
    if waits_from and scheduled:
        span.measured("engine_queue", waits_from, scheduled)
        span.note({"gen_ai.latency.time_in_queue": max(0.0, scheduled - waits_from)})
    computes_from = max(scheduled, waits_from)
    if computes_from and first > computes_from:
        span.measured("first_decode_token" if has_come else "compute", computes_from, first)
        if not has_come:
            span.note({"gen_ai.latency.time_in_model_prefill": first - computes_from})
    if first and last > first:
        span.measured("decode_steps", first, last)
        span.note({"gen_ai.latency.time_in_model_decode": last - first})
