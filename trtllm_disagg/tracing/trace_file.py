"""Writes spans to OTLP/JSON files in the format of OpenTelemetry's collector: one line per batch of spans."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec

from trtllm_disagg.tracing.spans import SpanData, Value

log = logging.getLogger(__name__)

SCOPE = "trtllm_disagg"
#: Attributes of a worker's root span: the longest time between two tokens, in seconds, and the tokens before it.
LONGEST_GAP = f"{SCOPE}.longest_gap"
LONGEST_GAP_AFTER = f"{SCOPE}.longest_gap_after_tokens"
#: At this size, about 10,000 requests, a file replaces the older one (OLD_SUFFIX), and a new file begins.
MAX_BYTES = 64 << 20
#: Subdirectory of a run directory, with one file per worker, named after it.
TRACES_DIR = "traces"
OLD_SUFFIX = ".1"
#: Maximum batches, of one request each, that wait for the disk: some seconds of a busy worker.
MAX_WAITING = 4096
_CLOSE_SECONDS = 5.0
#: Seconds that batches are gathered before writing: waking the thread for each would cost more CPU than its spans.
_GATHER_SECONDS = 0.05
_SERVER, _INTERNAL, _ERROR = 2, 1, 2


class TraceFile:
    """A `tracer.Receiver` with a thread that writes the spans, so no request waits for the disk."""

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
        #: Spans lost to a slow or full disk.
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
                    # A full disk or an unwritable span must not end this thread.
                    self._drop(self._waiting.popleft(), str(error))

    def _drop(self, batch: Sequence[SpanData], why: str) -> None:
        """Warn the first time; `close` logs the number."""
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
                    # A partial line would make later lines unreadable.
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                size += len(line)
                self._waiting.popleft()
            is_full = size >= self._max_bytes
        if is_full:
            self._keep_as_old()

    def _keep_as_old(self) -> None:
        """Continue in a new file; in the full one if it cannot be renamed, so that no span is lost."""
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
