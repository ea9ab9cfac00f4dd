"""Writes and reads files of OTLP/JSON, in the format of OpenTelemetry's collector: one line for each batch of spans."""

from __future__ import annotations

import errno
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tracing.spans import SpanData, SpanEvent, Value

log = logging.getLogger(__name__)

SCOPE = "trtllm_disagg"
#: Attributes of a worker's root span: the longest time between two of its tokens, in seconds, and the tokens before it.
LONGEST_GAP = f"{SCOPE}.longest_gap"
LONGEST_GAP_AFTER = f"{SCOPE}.longest_gap_after_tokens"
#: A file of this size, some 10000 requests, replaces the older one (OLD_SUFFIX), and a new file begins.
MAX_BYTES = 64 << 20
#: Subdirectory of a run directory, with one file for each worker, named after it.
TRACES_DIR = "traces"
OLD_SUFFIX = ".1"
#: Batches of one request each that may wait for the disk: as many as a busy worker makes in some seconds.
MAX_WAITING = 4096
_CLOSE_SECONDS = 5.0
#: How long batches are gathered before they are written: waking the thread for each would take more CPU than its spans.
_GATHER_SECONDS = 0.05
_SERVER, _INTERNAL, _ERROR = 2, 1, 2


class TraceFile:
    """A `tracer.Receiver`. A thread writes the spans, so no request waits for the disk."""

    def __init__(
        self,
        path: Path,
        resource: Mapping[str, Value],
        max_bytes: int = MAX_BYTES,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._path = path
        self._resource = {"attributes": _attributes(resource)}
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        #: Spans lost because the disk was too slow or full.
        self.num_dropped = 0
        self._waiting: deque[Sequence[SpanData]] = deque()
        self._has_news = Event()
        self._is_closed = Event()
        self._thread = Thread(target=self._write, name="trace-file", daemon=True)
        self._thread.start()

    def take(self, spans: Sequence[SpanData]) -> None:
        if len(self._waiting) >= self._max_waiting:
            self._drop(spans, "the disk does not keep up")
            return
        self._waiting.append(spans)
        if not self._has_news.is_set():
            self._has_news.set()

    def close(self) -> None:
        """Write all waiting spans, unless the disk takes too long."""
        self._is_closed.set()
        self._has_news.set()
        self._thread.join(_CLOSE_SECONDS)
        if self.num_dropped:
            log.warning("%s: %d spans were lost", self._path, self.num_dropped)

    def _write(self) -> None:
        while not self._is_closed.is_set() or self._waiting:
            self._has_news.wait()
            self._is_closed.wait(_GATHER_SECONDS)
            self._has_news.clear()
            while self._waiting:
                try:
                    self._write_waiting()
                except Exception as error:
                    # Neither a full disk nor a span that cannot be written ends this thread.
                    self._drop(self._waiting.popleft(), str(error))

    def _drop(self, batch: Sequence[SpanData], why: str) -> None:
        """Logged the first time only; `close` logs the number."""
        if not self.num_dropped:
            log.warning("%s: spans are lost: %s", self._path, why)
        self.num_dropped += len(batch)

    def _write_waiting(self) -> None:
        """Write one line for each batch, until the file is full."""
        with self._path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            while self._waiting and size < self._max_bytes:
                line = self._line(self._waiting[0])
                if file.write(line) < len(line):
                    # A partial line would make the lines after it unreadable.
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                size += len(line)
                self._waiting.popleft()
            is_full = size >= self._max_bytes
        if is_full:
            self._keep_as_old()

    def _keep_as_old(self) -> None:
        """Go on with a new file; with the full one where it cannot be renamed, as no span is lost by that."""
        old = self._path.with_name(self._path.name + OLD_SUFFIX)
        try:
            self._path.replace(old)
        except OSError as error:
            log.warning("%s grows beyond its limit, because it cannot become %s: %s", self._path, old, error)
            self._max_bytes = sys.maxsize

    def _line(self, spans: Sequence[SpanData]) -> bytes:
        scope = {"scope": {"name": SCOPE}, "spans": [_encoded(span) for span in spans]}
        batch = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        return msgspec.json.encode(batch) + b"\n"


def _encoded(span: SpanData) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        **({"parentSpanId": span.parent_id} if span.parent_id else {}),
        "name": span.name,
        "kind": _SERVER if span.is_remote else _INTERNAL,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
        "attributes": _attributes(span.attributes),
        "events": [
            {"name": event.name, "timeUnixNano": str(event.at), "attributes": _attributes(event.attributes)}
            for event in span.events
        ],
        "status": {} if span.error is None else {"code": _ERROR, "message": span.error},
    }


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _any_value(value)} for key, value in values.items()]


def _any_value(value: Value) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
    return {"arrayValue": {"values": [{"stringValue": each} for each in value]}}


@dataclass(slots=True)
class ReadSpan:
    """One span of a file, with the attributes of its process."""

    data: SpanData
    resource: dict[str, Value] = field(default_factory=dict)
    scope: str = ""


#: ESC among them; tabs and line ends stay.
_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}
#: Errors of `_decoded`, and of its JSON.
_NO_OTLP = (msgspec.MsgspecError, RecursionError, KeyError, TypeError, ValueError, AttributeError)


def read_spans(path: Path) -> Iterator[ReadSpan]:
    """Raises ConfigError for a file without OTLP/JSON. An unfinished last line is left out, others with a warning."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError.bad_value(
            "trace file", str(path), f"one that can be read ({error.strerror})"
        ) from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    refused: list[ConfigError] = []
    for number, line in lines:
        try:
            yield from [*_decoded(msgspec.json.decode(line))]
        except _NO_OTLP as error:
            if number < lines[-1][0] or text.endswith(b"\n"):
                allowed = f"lines of OTLP/JSON, each with resourceSpans; line {number} is none ({error!r})"
                refused.append(ConfigError.bad_value("trace file", str(path), allowed))
    if refused and len(refused) == len(lines):
        raise refused[0]
    if refused:
        log.warning("%d of %d lines are left out: %s", len(refused), len(lines), refused[0])


def _decoded(batch: dict[str, Any]) -> Iterator[ReadSpan]:
    for of_resource in batch["resourceSpans"]:
        resource = _read_attributes(of_resource.get("resource") or {})
        for of_scope in of_resource.get("scopeSpans") or ():
            scope = _text((of_scope.get("scope") or {}).get("name", ""))
            for span in of_scope.get("spans") or ():
                yield ReadSpan(_read(span), resource, scope)


def _read(span: dict[str, Any]) -> SpanData:
    status = span.get("status") or {}
    return SpanData(
        name=_text(span["name"]),
        trace_id=_text(span["traceId"]).lower(),
        span_id=_text(span["spanId"]).lower(),
        parent_id=_text(span.get("parentSpanId") or "").lower() or None,
        start=_time(span["startTimeUnixNano"]),
        end=_time(span["endTimeUnixNano"]),
        attributes=_read_attributes(span),
        events=[
            SpanEvent(_text(event["name"]), _time(event["timeUnixNano"]), _read_attributes(event))
            for event in span.get("events") or ()
        ],
        # The collector writes the number, other programs write the name.
        error=_text(status.get("message", ""))
        if status.get("code") in (_ERROR, "STATUS_CODE_ERROR")
        else None,
        is_remote=span.get("kind") in (_SERVER, "SPAN_KIND_SERVER"),
    )


def _text(value: object) -> str:
    """Without characters that a terminal obeys: a file may come from another program."""
    return str(value).translate(_CONTROL)


def _time(value: Any) -> int:
    """Raises ValueError for what is no 64-bit number of nanoseconds."""
    at = int(value)
    if at >> 64:
        raise ValueError("a time beyond 64 bits")
    return at


def _read_attributes(holder: dict[str, Any]) -> dict[str, Value]:
    return {
        _text(each["key"]): _read_value(each.get("value") or {}) for each in holder.get("attributes") or ()
    }


def _read_value(value: dict[str, Any]) -> Value:
    for kind, content in value.items():
        if kind == "arrayValue":
            return [str(_read_value(each)) for each in content.get("values") or ()]
        return _READ.get(kind, _text)(content)
    return ""


def _read_double(content: Any) -> float | str:
    """As text where JSON has no number for it: infinity, or none."""
    number = float(content)
    return number if math.isfinite(number) else str(number)


_READ: dict[str, Callable[[Any], str | bool | int | float]] = {
    "intValue": int,
    "doubleValue": _read_double,
    "boolValue": bool,
}
