"""Begins the span trees of requests, and passes ended spans to receivers. Environment variables choose the receivers;
OpenTelemetry's and Dynamo's variables, read as Dynamo's Rust runtime reads them, choose the requests that are traced.
"""

from __future__ import annotations

import logging
import time
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
    """Raises ConfigError for an unknown sampler, or a ratio outside of 0 to 1. The default follows the caller."""
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


#: Requests a second that `up` traces whole: spans of all would take a fifth of a busy worker's CPU.
MOST_A_SECOND = 32
#: The trace ids, as a sampler compares them.
_ALL_IDS = 1 << 64


class Limit:
    """Of each second some requests are traced whole, of the slowest ones and of failures only the end."""

    def __init__(self, most: int = MOST_A_SECOND, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._second = self._seen = 0
        self._ids = _ALL_IDS
        #: The longest time of a request that has ended in this second, in nanoseconds.
        self._slowest = 0

    def takes(self, trace_id: str) -> bool:
        """Chooses by the id, so that all workers of a request choose alike: they see about the same rate."""
        self._begin_second()
        self._seen += 1
        return int(trace_id[16:], 16) < self._ids

    def is_slowest(self, nanoseconds: int) -> bool:
        """None that has ended in this second took longer."""
        self._begin_second()
        is_slowest = nanoseconds > self._slowest
        self._slowest = max(self._slowest, nanoseconds)
        return is_slowest

    def _begin_second(self) -> None:
        second = int(self._clock())
        if second == self._second:
            return
        seen = self._seen if second == self._second + 1 else 0
        self._second, self._seen, self._slowest = second, 0, 0
        # By halves: workers that count differently choose the same ids, or one of them twice as many.
        self._ids = _ALL_IDS >> (max(0, seen - 1) // self._most).bit_length()


class Receiver(Protocol):
    def take(self, spans: Sequence[SpanData]) -> None:
        """Accept ended spans of one request. Never fails, and never waits for a network."""

    def close(self) -> None:
        """Write or send all spans, or give them up after some seconds. May block for so long."""


class Tracer:
    """Begins the traces of one worker. Without receivers it traces no request."""

    def __init__(
        self,
        receivers: Sequence[Receiver] = (),
        sampler: Sampler = lambda trace_id, parent: True,
        limit: Limit | None = None,
    ) -> None:
        self._receivers = receivers
        self._sampler = sampler
        self._limit = limit

    def begin(
        self,
        name: str,
        request_id: str | None,
        traceparent: str | None,
        headers: Mapping[str, str] | None,
        clock: RequestClock | None = None,
        *,
        is_limited: bool = True,
    ) -> Span:
        """`traceparent`: from the worker that sent the request, and traces it; without it, the frontend's in `headers`
        is used. `is_limited`: false for one that `wants_end`.
        """
        if not self._receivers:
            return NO_SPAN
        of_worker = TraceParent.read(traceparent)
        parent = of_worker or TraceParent.read((headers or {}).get(TRACEPARENT))
        trace_id = parent.trace_id if parent is not None else trace_id_of(request_id)
        is_over = (
            is_limited and of_worker is None and self._limit is not None and not self._limit.takes(trace_id)
        )
        if is_over or not self._sampler(trace_id, parent):
            return NO_SPAN
        return Recording(trace_id, self._take, clock).root(name, parent)

    def wants_end(self, nanoseconds: int, error: BaseException | None) -> bool:
        """Of a request that was not traced, and took so long."""
        return self._limit is not None and (error is not None or self._limit.is_slowest(nanoseconds))

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()

    def _take(self, spans: list[SpanData]) -> None:
        for receiver in self._receivers:
            receiver.take(spans)


def tracer_of(environ: Mapping[str, str], worker: str, instance: str) -> Tracer:
    """Raises ConfigError for an invalid variable. `worker`: role and strategy of this worker, `instance`: its id."""
    service = environ.get("OTEL_SERVICE_NAME") or "dynamo"
    resource = {"trtllm_disagg.worker": worker, "service.instance.id": instance, "service.name": service}
    receivers: list[Receiver] = []
    if environ.get(EXPORT_VARIABLE, "").lower() in _TRUE:
        receivers += _export(environ, resource)
    if path := environ.get(FILE_VARIABLE):
        receivers.append(TraceFile(Path(path), resource))
    is_chosen = any(environ.get(name) for name in (EXPORT_VARIABLE, SAMPLER, RATIO))
    return Tracer(receivers, sampler_of(environ), None if is_chosen else Limit()) if receivers else Tracer()


def _export(environ: Mapping[str, str], resource: Mapping[str, Value]) -> list[Receiver]:
    """Empty, with a warning, without the library: the variable may be set for the spans of Dynamo's runtime alone."""
    try:
        from trtllm_disagg.tracing.otlp_export import OtlpExport

        return [OtlpExport(environ, resource)]
    except ModuleNotFoundError as error:
        install = "pip install 'trtllm-disagg[otel]'"
        log.warning("%s: no spans of this worker (%s; %s)", EXPORT_VARIABLE, error, install)
        return []
