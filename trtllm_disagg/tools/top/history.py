"""Computes what changes between snapshots: rates, latencies of the last seconds, and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from trtllm_disagg.tools.top.snapshot import (
    DEAD,
    EMPTY,
    SILENT,
    Latency,
    Process,
    Snapshot,
    WorkerLoad,
    latency,
)

#: Of latencies and rates.
WINDOW_SECONDS = 30.0
_MOST_EVENTS = 200


@dataclass(frozen=True, slots=True)
class Event:
    #: Seconds since the epoch.
    at: float
    text: str
    is_bad: bool = False


@dataclass(slots=True)
class History:
    """The snapshots of the last WINDOW_SECONDS, and the last events."""

    looks: deque[Snapshot] = field(default_factory=deque)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))

    def add(self, seen: Snapshot) -> list[Event]:
        """Add a snapshot, and return its events."""
        new = list(events_between(self.looks[-1], seen)) if self.looks else []
        self.looks.append(seen)
        while len(self.looks) > 2 and seen.at - self.looks[0].at > WINDOW_SECONDS:
            self.looks.popleft()
        self.events.extend(new)
        return new

    @property
    def last(self) -> Snapshot:
        return self.looks[-1]

    def ttft(self) -> Latency | None:
        return latency(self.last.frontend.ttft, self.looks[0].frontend.ttft if self._has_past else EMPTY)

    def itl(self) -> Latency | None:
        return latency(self.last.frontend.itl, self.looks[0].frontend.itl if self._has_past else EMPTY)

    @property
    def _has_past(self) -> bool:
        """A frontend that was started again counts from zero."""
        pairs = [(a.frontend.requests or 0, b.frontend.requests or 0) for a, b in pairwise(self.looks)]
        return len(self.looks) > 1 and all(before <= after for before, after in pairs)

    def rate(self, process: Process, name: str) -> float | None:
        """The rate per second of a running total; None without two snapshots of it, or if the last one lacks it."""
        if getattr(process.load, name) is None:
            return None
        values = [
            (look.at, value)
            for look in self.looks
            for each in look.processes
            if each.name == process.name
            and each.pid == process.pid
            and (value := getattr(each.load, name)) is not None
        ]
        if len(values) < 2 or values[-1][0] <= values[0][0]:
            return None
        (began, first), (ended, last) = values[0], values[-1]
        return max(0.0, float((last - first) / (ended - began)))


def events_between(before: Snapshot, after: Snapshot) -> Iterator[Event]:
    def event(text: str, *, is_bad: bool = False) -> Event:
        return Event(after.at, text, is_bad)

    if after.doubt and after.doubt != before.doubt:
        yield event(after.doubt, is_bad=True)
    if before.strategy and after.strategy and after.strategy != before.strategy:
        yield event(f"the order is {after.strategy} now (it was {before.strategy})")
    known = {process.name: process for process in before.processes}
    for process in after.processes:
        old = known.pop(process.name, None)
        if old is None:
            yield event(f"{process.name} is new, {process.state}")
            continue
        if old.pid != process.pid and old.pid and process.pid:
            yield event(f"{process.name} was started again: pid {process.pid}")
        if old.state != process.state:
            bad = process.state in (DEAD, SILENT, "exited", "restarting")
            now = "does not answer any more" if process.state == SILENT else f"is {process.state}"
            yield event(f"{process.name} {now} (it was {old.state})", is_bad=bad)
        yield from (event(text, is_bad=True) for text in _rises(process.name, old.load, process.load))
    yield from (event(f"{name} has left") for name in known)
    yield from (event(text, is_bad=True) for text in after.warnings)


def _rises(name: str, before: WorkerLoad, after: WorkerLoad) -> Iterator[str]:
    for what, more in (
        ("fallbacks", "took another way"),
        ("requests_shed", "were refused: too many waited"),
    ):
        old, new = getattr(before, what), getattr(after, what)
        if old is not None and new is not None and new > old:
            yield f"{name}: {new - old} request{'s' * (new - old > 1)} {more}"
    if (after.breakers_open or 0) > (before.breakers_open or 0):
        yield f"{name}: circuit breaker open for {after.breakers_open} worker{'s' * (after.breakers_open != 1)}"
