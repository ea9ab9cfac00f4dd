"""Begins the trees of spans, and gives what has ended to its receivers. What is on is said by the environment; which
requests are traced, by OpenTelemetry's own variables and Dynamo's, read as Dynamo's Rust runtime reads them.
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

#: `up` names a worker's file in it.
FILE_VARIABLE = "TRTLLM_DISAGG_TRACE_FILE"
#: Dynamo's own.
EXPORT_VARIABLE = "OTEL_EXPORT_ENABLED"
_TRUE = ("1", "true", "yes", "on")

SAMPLER, ARGUMENT, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_TRACES_SAMPLE_RATIO"

#: Is a request of this trace id, with what its caller has decided, traced?
Sampler = Callable[[str, TraceParent | None], bool]

_PARENT_BASED = "parentbased_"
_KINDS = ("always_on", "always_off", "traceidratio")
_NAMES = (*_KINDS, *(_PARENT_BASED + kind for kind in _KINDS))


def sampler_of(environ: Mapping[str, str]) -> Sampler:
    """Raises ConfigError for a sampler that is none, or a ratio outside of 0 to 1. As everywhere, a caller that has
    decided is followed, unless a sampler is named that follows none.
    """
    name = environ.get(SAMPLER) or (f"{_PARENT_BASED}traceidratio" if environ.get(RATIO) else _NAMES[3])
    if name not in _NAMES:
        raise ConfigError.bad_value(SAMPLER, name, f"one of {', '.join(_NAMES)}")
    ratio = _ratio(environ, ARGUMENT if environ.get(SAMPLER) else RATIO)
    kind = name.removeprefix(_PARENT_BASED)
    limit = {"always_on": 1.0, "always_off": 0.0, "traceidratio": ratio}[kind] * (1 << 64)
    follows = name.startswith(_PARENT_BASED)

    def is_sampled(trace_id: str, parent: TraceParent | None) -> bool:
        if follows and parent is not None:
            return parent.is_sampled
        # As all SDKs compare it: workers and frontends then choose the same traces.
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
    """Raises ConfigError when a variable of export or sampling has a value that means nothing. `worker` says what this
    one does, `instance` which it is.
    """
    resource = {"trtllm_disagg.worker": worker, "service.instance.id": instance}
    receivers: list[Receiver] = []
    if environ.get(EXPORT_VARIABLE, "").lower() in _TRUE:
        receivers += _export(environ, resource)
    if path := environ.get(FILE_VARIABLE):
        service = environ.get("OTEL_SERVICE_NAME") or "dynamo"
        receivers.append(TraceFile(Path(path), resource | {"service.name": service}))
    return Tracer(receivers, sampler_of(environ)) if receivers else NoTracer()


def _export(environ: Mapping[str, str], resource: Mapping[str, Value]) -> list[Receiver]:
    """Empty where the library is not installed: Dynamo's runtime exports its own spans without it, and scripts for
    Dynamo's worker, which has no others, set the variable for those.
    """
    try:
        from trtllm_disagg.tracing.otlp_export import OtlpExport

        return [OtlpExport(environ, resource)]
    except ModuleNotFoundError as error:
        install = "pip install 'trtllm-disagg[otel]'"
        log.warning("%s: no spans of this worker (%s; %s)", EXPORT_VARIABLE, error, install)
        return []
