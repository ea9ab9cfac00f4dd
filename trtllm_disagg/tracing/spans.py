"""Spans: one tree per request and worker. Imports nothing of this project.

An untraced request has only `NO_SPAN`: its methods do nothing. Tokens have no spans.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value | None]
_NONE: Attributes = {}
_MAX_ID = (1 << 64) - 1

TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceParent(NamedTuple):
    """The W3C trace context; ids are hexadecimal."""

    trace_id: str
    span_id: str
    is_sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    @classmethod
    def read(cls, text: str | None) -> TraceParent | None:
        """None for an invalid trace context."""
        found = _TRACEPARENT.fullmatch(text or "")
        if found is None or not (int(found[1], 16) and int(found[2], 16)):
            return None
        return cls(found[1], found[2], bool(int(found[3], 16) & 1))


class SpanEvent(NamedTuple):
    """A span's event; `at`: nanoseconds since the epoch."""

    name: str
    at: int
    attributes: dict[str, Value]


@dataclass(slots=True)
class SpanData:
    """A span's content; `start` and `end`: nanoseconds since the epoch; ids are hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start: int
    end: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    #: The error that ended it; None for success.
    error: str | None = None
    #: Its parent span is in another process.
    is_remote: bool = False


class Span:
    """The interface of spans; this class records nothing. As a context manager, a span ends with the block."""

    is_recording = False

    def child(self, name: str, attributes: Attributes = _NONE) -> Span:
        """Begin a child span now."""
        return self

    def measured(self, name: str, start: float, end: float, attributes: Attributes = _NONE) -> Span:
        """Add an ended child, in seconds of the monotonic clock. Time outside this span is cut off."""
        return NO_SPAN

    def note(self, attributes: Attributes) -> None:
        """Set attributes, except those with value None."""

    def event(self, name: str, attributes: Attributes = _NONE, at: int | None = None) -> None:
        """Add an event, now or at a time of the request's clock."""

    def end(self, error: BaseException | None = None, at: int | None = None) -> None:
        """End the span. Later calls of `end`, `note` and `event` are ignored."""

    @property
    def traceparent(self) -> str | None:
        """The trace context that puts another process's spans below this one; None without a trace."""
        return None

    def headers(self, given: dict[str, str] | None) -> dict[str, str] | None:
        """The trace headers for an engine, from the request's."""
        return given

    def __enter__(self) -> Span:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        self.end(error)


NO_SPAN = Span()


class RequestClock:
    """The only source of a request's times on this worker, for spans and log line, in nanoseconds since the epoch. It
    reads the wall clock once, so setting that clock does not shift the request's times.
    """

    __slots__ = ("_offset", "start")

    #: Monotonic nanoseconds; the cheapest call, for every token.
    tick = staticmethod(time.monotonic_ns)

    def __init__(self) -> None:
        self.start = time.time_ns()
        self._offset = self.start - self.tick()

    def now(self) -> int:
        return self.tick() + self._offset

    def at(self, seconds: float) -> int:
        """Convert seconds of the monotonic clock."""
        return int(seconds * 1e9) + self._offset


class Recording:
    """The spans of one request on one worker. `take` gets all at the root span's end, then each late one."""

    def __init__(
        self, trace_id: str, take: Callable[[list[SpanData]], None], clock: RequestClock | None = None
    ) -> None:
        self.trace_id = trace_id
        self.clock = clock or RequestClock()
        self._take = take
        # One random number serves all ids: the system's source takes 5 us, and a request has ten spans.
        self._last_id = random.getrandbits(64)
        self._ended: list[SpanData] = []
        self._root: SpanData | None = None

    def root(self, name: str, parent: TraceParent | None) -> RecordedSpan:
        root = RecordedSpan(self, name, parent and parent.span_id)
        self._root = root.data
        root.data.start = self.clock.start
        root.data.is_remote = parent is not None
        return root

    def next_id(self) -> str:
        self._last_id = (self._last_id + 1) & _MAX_ID or 1
        return f"{self._last_id:016x}"

    def ended(self, span: RecordedSpan) -> None:
        self._ended.append(span.data)
        if self._root is not None and not self._root.end:
            return
        ended, self._ended = self._ended, []
        self._take(ended)


class RecordedSpan(Span):
    is_recording = True

    def __init__(
        self, recording: Recording, name: str, parent_id: str | None, attributes: Attributes = _NONE
    ) -> None:
        self._recording = recording
        self._now = recording.clock.now
        self.data = SpanData(name, recording.trace_id, recording.next_id(), parent_id, self._now())
        if attributes:
            self.note(attributes)

    def child(self, name: str, attributes: Attributes = _NONE) -> Span:
        return RecordedSpan(self._recording, name, self.data.span_id, attributes)

    def measured(self, name: str, start: float, end: float, attributes: Attributes = _NONE) -> Span:
        now, at = self._now(), self._recording.clock.at
        begin, last = (min(max(at(each), self.data.start), now) for each in (start, end))
        if last <= begin:  # outside this span, or from another machine's clock
            return NO_SPAN
        child = RecordedSpan(self._recording, name, self.data.span_id, attributes)
        child.data.start = begin
        child.end(at=last)
        return child

    def note(self, attributes: Attributes) -> None:
        if not self.data.end:
            self.data.attributes.update(_known(attributes))

    def event(self, name: str, attributes: Attributes = _NONE, at: int | None = None) -> None:
        if not self.data.end:
            self.data.events.append(SpanEvent(name, at or self._now(), _known(attributes)))

    def end(self, error: BaseException | None = None, at: int | None = None) -> None:
        if self.data.end:
            return
        # The reader does not want the result, like `concurrent` if prefill still runs after the answer.
        if error is not None and not isinstance(error, GeneratorExit | asyncio.CancelledError):
            self.data.error = f"{type(error).__name__}: {error}"
        self.data.end = at or self._now()
        self._recording.ended(self)

    @property
    def traceparent(self) -> str:
        return str(TraceParent(self.data.trace_id, self.data.span_id, True))

    def headers(self, given: dict[str, str] | None) -> dict[str, str]:
        return (given or {}) | {TRACEPARENT: self.traceparent}


def _known(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def trace_id_of(request_id: str | None) -> str:
    """For a request without a trace id: equal on all its workers, and evenly distributed, as samplers need."""
    if request_id is None:
        return secrets.token_hex(16)
    return hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()
