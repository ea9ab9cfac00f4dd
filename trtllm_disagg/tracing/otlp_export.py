"""Sends spans to a collector in batches, from the thread of OpenTelemetry's exporter (extra `otel`).

OpenTelemetry's variables, which Dynamo's runtime also reads, set endpoint, protocol, headers, compression and batching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from threading import Thread
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tracing.spans import SpanData, Value
from trtllm_disagg.tracing.trace_file import SCOPE

_PROTOCOLS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
#: Seconds that a close waits for a dead collector; the library would wait 30.
_CLOSE_SECONDS = 5.0
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(SCOPE)


class OtlpExport:
    """A `tracer.Receiver`."""

    def __init__(self, environ: Mapping[str, str], resource: Mapping[str, Value]) -> None:
        """Raises ConfigError for an unknown protocol, ModuleNotFoundError if its exporter is not installed."""
        self._resource = Resource.create(dict(resource))
        self._processor = BatchSpanProcessor(_exporter(environ))

    def take(self, spans: Sequence[SpanData]) -> None:
        for span in spans:
            self._processor.on_end(self._readable(span))

    def close(self) -> None:
        closing = Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def _readable(self, span: SpanData) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id),
            parent=None
            if span.parent_id is None
            else _context(span.trace_id, span.parent_id, is_remote=span.is_remote),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, event.at) for event in span.events],
            kind=SpanKind.SERVER if span.is_remote else SpanKind.INTERNAL,
            status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start,
            end_time=span.end,
            instrumentation_scope=_SCOPE,
        )


def _exporter(environ: Mapping[str, str]) -> SpanExporter:
    variable = next((each for each in _PROTOCOL_VARIABLES if environ.get(each)), _PROTOCOL_VARIABLES[0])
    protocol = environ.get(variable) or "grpc"
    if protocol not in _PROTOCOLS:
        raise ConfigError.bad_value(variable, protocol, f"one of {', '.join(_PROTOCOLS)}")
    exporter: Any = import_module(_PROTOCOLS[protocol]).OTLPSpanExporter
    return exporter()


def _context(trace_id: str, span_id: str, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, _SAMPLED)
