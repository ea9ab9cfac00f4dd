"""Begins requests' span trees, and passes ended spans to receivers. Environment variables choose the receivers, and the
traced requests: OpenTelemetry's and Dynamo's, read as Dynamo's Rust runtime does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

#: The path of a worker's trace file, set by `up`.
FILE_VARIABLE = "TRTLLM_DISAGG_TRACE_FILE"
#: Dynamo's variable that enables the export of spans.
EXPORT_VARIABLE = "OTEL_EXPORT_ENABLED"
_TRUE = ("1", "true", "yes", "on")

SAMPLER, ARGUMENT, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_TRACES_SAMPLE_RATIO"

#: Decides by trace id and the caller's decision whether to trace a request.
Sampler = Callable[[str, TraceParent | None], bool]

_PARENT_BASED = "parentbased_"
_SAMPLERS = ("always_on", "always_off", "traceidratio")
_NAMES = (*_SAMPLERS, *(_PARENT_BASED + sampler for sampler in _SAMPLERS))


def sampler_of(environ: Mapping[str, str]) -> Sampler:
    """Raises ConfigError for an unknown sampler or a ratio outside 0 to 1. By default the caller decides."""
    name = environ.get(SAMPLER) or (f"{_PARENT_BASED}traceidratio" if environ.get(RATIO) else _NAMES[3])
    if name not in _NAMES:
        raise ConfigError.bad_value(SAMPLER, name, f"one of {', '.join(_NAMES)}")
    ratio = _ratio(environ, ARGUMENT if environ.get(SAMPLER) else RATIO)
    sampler = name.removeprefix(_PARENT_BASED)
    limit = {"always_on": 1.0, "always_off": 0.0, "traceidratio": ratio}[sampler] * (1 << 64)
    follows_caller = name.startswith(_PARENT_BASED)

    def is_sampled(trace_id: str, parent: TraceParent | None) -> bool:
        if follows_caller and parent is not None:
            return parent.is_sampled
        # As in every SDK: workers and frontends choose the same traces.
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


#: Requests a second that `up` traces fully: tracing all would take a fifth of a busy worker's CPU.
MAX_A_SECOND = 32
#: The range of trace ids in a sampler's comparison.
_ALL_IDS = 1 << 64


class Limit:
    """Traces some requests of each second fully, and only the end of the slowest and the failed."""

    def __init__(self, max_a_second: int = MAX_A_SECOND, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_a_second = max_a_second
        self._clock = clock
        self._second = self._seen = 0
        self._ids = _ALL_IDS
        #: The slowest request that ended in this second, in nanoseconds.
        self._slowest = 0

    def takes(self, trace_id: str) -> bool:
        """Choose by id, so that all workers of a request choose alike, since they see about the same rate."""
        self._begin_second()
        self._seen += 1
        return int(trace_id[16:], 16) < self._ids

    def is_slowest(self, nanoseconds: int) -> bool:
        """Whether no request that ended in this second took longer."""
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
        # By halves, so workers that count differently choose the same ids, or one twice as many.
        self._ids = _ALL_IDS >> (max(0, seen - 1) // self._max_a_second).bit_length()


class Receiver(Protocol):
    def take(self, spans: Sequence[SpanData]) -> None:
        """Accept ended spans of one request. Never fails or waits for a network."""

    def close(self) -> None:
        """Write or send all spans, or drop them after some seconds. May block that long."""


@dataclass(eq=False)
class Tracer:
    """Begins the traces of one worker. Without receivers it traces no request."""

    receivers: Sequence[Receiver] = ()
    sampler: Sampler = lambda trace_id, parent: True
    limit: Limit | None = None

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
        """`traceparent`: of the sending worker, if it traces the request; else the frontend's in `headers` counts.
        `is_limited`: false for a request that `wants_end`.
        """
        if not self.receivers:
            return NO_SPAN
        of_worker = TraceParent.read(traceparent)
        parent = of_worker or TraceParent.read((headers or {}).get(TRACEPARENT))
        trace_id = parent.trace_id if parent is not None else trace_id_of(request_id)
        is_over = (
            is_limited and of_worker is None and self.limit is not None and not self.limit.takes(trace_id)
        )
        if is_over or not self.sampler(trace_id, parent):
            return NO_SPAN
        return Recording(trace_id, self._take, clock).root(name, parent)

    def wants_end(self, nanoseconds: int, error: BaseException | None) -> bool:
        """Whether to trace the end of an untraced request that took `nanoseconds`."""
        return self.limit is not None and (error is not None or self.limit.is_slowest(nanoseconds))

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()

    def _take(self, spans: list[SpanData]) -> None:
        for receiver in self.receivers:
            receiver.take(spans)


def tracer_of(environ: Mapping[str, str], worker: str, instance: str) -> Tracer:
    """Raises ConfigError for an invalid variable. `worker`: role and strategy; `instance`: this worker's id."""
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
    """Empty, with a warning, without the library: the variable may be meant only for Dynamo's runtime."""
    try:
        from trtllm_disagg.tracing.otlp_export import OtlpExport

        return [OtlpExport(environ, resource)]
    except ModuleNotFoundError as error:
        install = "pip install 'trtllm-disagg[otel]'"
        log.warning("%s: exporting no spans of this worker (%s; %s)", EXPORT_VARIABLE, error, install)
        return []
