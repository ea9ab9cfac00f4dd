"""Snapshots of a deployment, and what changes between them: rates, latencies and events. None: could not be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

#: States besides those of `up`: gone, and silent though it should answer.
DEAD, SILENT = "dead", "no answer"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load, from its /metrics page."""

    #: Requests in the engine, running or waiting.
    batch: int | None = None
    #: Requests without a first token.
    queued: int | None = None
    kv_blocks: int | None = None
    kv_blocks_total: int | None = None
    handoffs_held: int | None = None
    #: Peers that the circuit breaker skips.
    breakers_open: int | None = None
    #: Since the start of the worker.
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    #: Requests served by a fallback.
    fallbacks: int | None = None
    requests_shed: int | None = None

    @property
    def kv_use(self) -> float | None:
        if self.kv_blocks is None or not self.kv_blocks_total:
            return None
        return self.kv_blocks / self.kv_blocks_total


@dataclass(frozen=True, slots=True)
class Process:
    name: str
    role: str
    state: str
    pid: int | None = None
    #: Its reported activity.
    doing: str = ""
    load: WorkerLoad = field(default_factory=WorkerLoad)
    #: Hexadecimal.
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and quantiles of `count` measurements, in seconds."""

    count: int
    mean: float
    p50: float
    p99: float


class Histogram(NamedTuple):
    """(upper bound in seconds, measurements up to it) per bucket, and the sum of all."""

    buckets: tuple[tuple[float, float], ...] = ()
    total: float = 0.0


EMPTY = Histogram()


@dataclass(frozen=True, slots=True)
class FrontendLoad:
    """The frontend's load, from its /metrics page."""

    running: int | None = None
    waiting: int | None = None
    requests: int | None = None
    #: Since the start of the frontend.
    ttft: Histogram = EMPTY
    itl: Histogram = EMPTY


@dataclass(frozen=True, slots=True)
class Snapshot:
    #: Seconds since the epoch.
    at: float
    url: str
    model: str
    #: Current strategy; empty if unknown.
    strategy: str
    #: What invalidates the whole snapshot, such as a missing `up`.
    doubt: str
    processes: tuple[Process, ...]
    frontend: FrontendLoad
    #: New warnings and errors in the workers' logs, as "worker: text".
    warnings: tuple[str, ...] = ()


def latency(now: Histogram, before: Histogram = EMPTY) -> Latency | None:
    """Latency of the measurements since `before`; None if there are none."""
    old = dict(before.buckets)
    counts = [(bound, count - old.get(bound, 0.0)) for bound, count in now.buckets]
    count = counts[-1][1] if counts else 0.0
    if count <= 0:
        return None
    mean = (now.total - before.total) / count
    return Latency(int(count), mean, _quantile(counts, 0.5), _quantile(counts, 0.99))


def share_within(limit: float, now: Histogram, before: Histogram = EMPTY) -> float | None:
    """Share of the measurements since `before` within `limit`; None if there are none."""
    old = dict(before.buckets)
    lower, below, within = 0.0, 0.0, None
    for bound, total in now.buckets:
        count = total - old.get(bound, 0.0)
        if within is None and bound >= limit:
            part = 0.0 if bound == float("inf") else (limit - lower) / (bound - lower)
            within = below + (count - below) * part
        lower, below = bound, count
    return within / below if within is not None and below > 0 else None


def _quantile(counts: list[tuple[float, float]], share: float) -> float:
    """Like Prometheus' histogram_quantile: linear inside a bucket, else the last finite bound."""
    rank = share * counts[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


#: Seconds that latencies and rates cover.
WINDOW_SECONDS = 30.0
_MAX_EVENTS = 200


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
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))

    def add(self, seen: Snapshot) -> None:
        if self.looks:
            self.events.extend(events_between(self.last, seen))
        self.looks.append(seen)
        while len(self.looks) > 2 and seen.at - self.looks[0].at > WINDOW_SECONDS:
            self.looks.popleft()

    @property
    def last(self) -> Snapshot:
        return self.looks[-1]

    def ttft(self) -> Latency | None:
        return latency(self.last.frontend.ttft, self.looks[0].frontend.ttft if self._has_past else EMPTY)

    def itl(self) -> Latency | None:
        return latency(self.last.frontend.itl, self.looks[0].frontend.itl if self._has_past else EMPTY)

    @property
    def _has_past(self) -> bool:
        """False after a restart of the frontend, which counts from zero."""
        pairs = [(a.frontend.requests or 0, b.frontend.requests or 0) for a, b in pairwise(self.looks)]
        return len(self.looks) > 1 and all(before <= after for before, after in pairs)

    def rate(self, process: Process, name: str) -> float | None:
        """Increase per second of a counter; None without two snapshots, or if the last one lacks it."""
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
        yield event(f"the order is now {after.strategy} (was {before.strategy})")
    known = {process.name: process for process in before.processes}
    for process in after.processes:
        old = known.pop(process.name, None)
        if old is None:
            yield event(f"{process.name} appeared, {process.state}")
            continue
        if old.pid != process.pid and old.pid and process.pid:
            yield event(f"{process.name} restarted: pid {process.pid}")
        if old.state != process.state:
            bad = process.state in (DEAD, SILENT, "exited", "restarting")
            now = "no longer answers" if process.state == SILENT else f"is {process.state}"
            yield event(f"{process.name} {now} (was {old.state})", is_bad=bad)
        yield from (event(text, is_bad=True) for text in _rises(process.name, old.load, process.load))
    yield from (event(f"{name} has left") for name in known)
    yield from (event(text, is_bad=True) for text in after.warnings)


def _rises(name: str, before: WorkerLoad, after: WorkerLoad) -> Iterator[str]:
    for what, more in (("fallbacks", "fell back"), ("requests_shed", "were refused: too many waited")):
        old, new = getattr(before, what), getattr(after, what)
        if old is not None and new is not None and new > old:
            yield f"{name}: {new - old} request{'s' * (new - old > 1)} {more}"
    if (after.breakers_open or 0) > (before.breakers_open or 0):
        yield f"{name}: circuit breaker open for {after.breakers_open} worker{'s' * (after.breakers_open != 1)}"
