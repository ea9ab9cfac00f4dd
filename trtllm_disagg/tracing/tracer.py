"""Begins the trees of spans, and gives what has ended to its receivers. What is on is said by the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trtllm_disagg.tracing.sampling import Sampler, sampler_of
from trtllm_disagg.tracing.spans import (
    NO_SPAN,
    TRACEPARENT,
    Recording,
    RequestClock,
    Span,
    SpanData,
    TraceParent,
    trace_id_of,
)
from trtllm_disagg.tracing.trace_file import TraceFile

#: `up` names a worker's file in it.
FILE_VARIABLE = "TRTLLM_DISAGG_TRACE_FILE"
#: Dynamo's own.
EXPORT_VARIABLE = "OTEL_EXPORT_ENABLED"
_TRUE = ("1", "true", "yes", "on")


class Receiver(Protocol):
    def take(self, spans: Sequence[SpanData]) -> None:
        """Some that have ended, of one request. Never fails, and never waits for a network."""

    def close(self) -> None:
        """What was taken is where it belongs, or is given up. May block for some seconds."""


class Tracer:
    """Of one worker."""

    def __init__(self, receivers: Sequence[Receiver], sampler: Sampler) -> None:
        self._receivers = receivers
        self._sampler = sampler

    def begin(
        self,
        name: str,
        request_id: str | None,
        traceparent: str | None,
        headers: Mapping[str, str] | None,
        clock: RequestClock | None = None,
    ) -> Span:
        """`traceparent` is that of the worker that sent the request; else the frontend's, in the headers, counts."""
        parent = TraceParent.read(traceparent) or TraceParent.read((headers or {}).get(TRACEPARENT))
        trace_id = parent.trace_id if parent is not None else trace_id_of(request_id)
        if not self._sampler(trace_id, parent):
            return NO_SPAN
        return Recording(trace_id, self._take, clock).root(name, parent)

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()

    def _take(self, spans: list[SpanData]) -> None:
        for receiver in self._receivers:
            receiver.take(spans)


class NoTracer(Tracer):
    """No request is traced."""

    def __init__(self) -> None:
        super().__init__((), lambda trace_id, parent: False)

    def begin(
        self,
        name: str,
        request_id: str | None,
        traceparent: str | None,
        headers: Mapping[str, str] | None,
        clock: RequestClock | None = None,
    ) -> Span:
        return NO_SPAN


def tracer_of(environ: Mapping[str, str], worker: str, instance: str) -> Tracer:
    """Raises ConfigError when export is asked for and the library for it is not installed, or a variable of it has a
    value that means nothing. `worker` says what this one does, `instance` which it is.
    """
    receivers: list[Receiver] = []
    resource = {"trtllm_disagg.worker": worker, "service.instance.id": instance}
    if environ.get(EXPORT_VARIABLE, "").lower() in _TRUE:
        from trtllm_disagg.tracing.otlp_export import OtlpExport

        receivers.append(OtlpExport(environ, resource))
    if path := environ.get(FILE_VARIABLE):
        service = environ.get("OTEL_SERVICE_NAME") or "dynamo"
        receivers.append(TraceFile(Path(path), resource | {"service.name": service}))
    return Tracer(receivers, sampler_of(environ)) if receivers else NoTracer()
