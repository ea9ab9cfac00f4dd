"""Begins the span trees of requests, and passes ended spans to receivers. Environment variables choose the receivers;
OpenTelemetry's and Dynamo's variables, read as Dynamo's Rust runtime reads them, choose the requests that are traced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tracing.spans import (
    NO_SPAN,
    TRACEPARENT,
    Recording,
    RequestClock,
    Span,
    SpanData,
    TraceParent,
    Value,
    trace_id_of,
)
from trtllm_disagg.tracing.trace_file import TraceFile

log = logging.getLogger(__name__)

#: The variable in which `up` gives a worker the path of its trace file.
FILE_VARIABLE = "TRTLLM_DISAGG_TRACE_FILE"
#: Dynamo's variable that enables the export of spans.
EXPORT_VARIABLE = "OTEL_EXPORT_ENABLED"
_TRUE = ("1", "true", "yes", "on")

SAMPLER, ARGUMENT, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_TRACES_SAMPLE_RATIO"

#: Decides from the trace id and the caller's decision whether a request is traced.
Sampler = Callable[[str, TraceParent | None], bool]

_PARENT_BASED = "parentbased_"
_KINDS = ("always_on", "always_off", "traceidratio")
_NAMES = (*_KINDS, *(_PARENT_BASED + kind for kind in _KINDS))


def sampler_of(environ: Mapping[str, str]) -> Sampler:
    """Raises ConfigError for an unknown sampler, or a ratio outside of 0 to 1. As in every SDK, the default sampler
    follows the decision of a caller that has made one.
    """
    name = environ.get(SAMPLER) or (f"{_PARENT_BASED}traceidratio" if environ.get(RATIO) else _NAMES[3])
    if name not in _NAMES:
        raise ConfigError.bad_value(SAMPLER, name, f"one of {', '.join(_NAMES)}")
    ratio = _ratio(environ, ARGUMENT if environ.get(SAMPLER) else RATIO)
    kind = name.removeprefix(_PARENT_BASED)
    limit = {"always_on": 1.0, "always_off": 0.0, "traceidratio": ratio}[kind] * (1 << 64)
    follows_caller = name.startswith(_PARENT_BASED)

    def is_sampled(trace_id: str, parent: TraceParent | None) -> bool:
        if follows_caller and parent is not None:
            return parent.is_sampled
        # As in every SDK, so that workers and frontends choose the same traces.
        return int(trace_id[16:], 16) < limit

    return is_sampled


def _ratio(environ: Mapping[str, str], variable: str) -> float:
    text = environ.get(variable) or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError.bad_value(variable, text, "a number from 0 to 1")
    return ratio


class Receiver(Protocol):
    def take(self, spans: Sequence[SpanData]) -> None:
        """Accept ended spans of one request. Never fails, and never waits for a network."""

    def close(self) -> None:
        """Write or send all spans, or give them up after some seconds. May block for so long."""


class Tracer:
    """Begins the traces of one worker. Without receivers it traces no request."""

    def __init__(
        self, receivers: Sequence[Receiver] = (), sampler: Sampler = lambda trace_id, parent: True
    ) -> None:
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
        """`traceparent`: from the worker that sent the request; without it, the frontend's in `headers` is used."""
        if not self._receivers:
            return NO_SPAN
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


def tracer_of(environ: Mapping[str, str], worker: str, instance: str) -> Tracer:
    """Raises ConfigError for an invalid value of a variable of export or sampling. `worker` is this worker's role and
    strategy, `instance` its id.
    """
    service = environ.get("OTEL_SERVICE_NAME") or "dynamo"
    resource = {"trtllm_disagg.worker": worker, "service.instance.id": instance, "service.name": service}
    receivers: list[Receiver] = []
    if environ.get(EXPORT_VARIABLE, "").lower() in _TRUE:
        receivers += _export(environ, resource)
    if path := environ.get(FILE_VARIABLE):
        receivers.append(TraceFile(Path(path), resource))
    return Tracer(receivers, sampler_of(environ)) if receivers else Tracer()


def _export(environ: Mapping[str, str], resource: Mapping[str, Value]) -> list[Receiver]:
    """Empty, with a warning, where the library is not installed: the variable may be set only for the spans of Dynamo's
    runtime, which needs no such library.
    """
    try:
        from trtllm_disagg.tracing.otlp_export import OtlpExport

        return [OtlpExport(environ, resource)]
    except ModuleNotFoundError as error:
        install = "pip install 'trtllm-disagg[otel]'"
        log.warning("%s: no spans of this worker (%s; %s)", EXPORT_VARIABLE, error, install)
        return []
