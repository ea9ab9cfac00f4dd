"""The content of one snapshot of a deployment. Numbers are None where they could not be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

#: Beside the states of `up`'s own table: it is gone, and it does not answer though it should.
DEAD, SILENT = "dead", "no answer"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of one worker, from its /metrics page."""

    #: Requests that run or wait in the engine.
    batch: int | None = None
    #: Requests without a first token yet.
    queued: int | None = None
    kv_blocks: int | None = None
    kv_blocks_total: int | None = None
    handoffs_held: int | None = None
    #: Workers of the other role that the circuit breaker skips.
    breakers_open: int | None = None
    #: Counted since the start of the worker.
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    #: Requests that were served by a fallback step.
    fallbacks: int | None = None
    requests_shed: int | None = None

    @property
    def kv_use(self) -> float | None:
        if self.kv_blocks is None or not self.kv_blocks_total:
            return None
        return self.kv_blocks / self.kv_blocks_total


@dataclass(frozen=True, slots=True)
class Process:
    """A worker, the frontend, or NATS."""

    name: str
    role: str
    state: str
    pid: int | None = None
    #: What it reports that it does.
    doing: str = ""
    load: WorkerLoad = field(default_factory=WorkerLoad)


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and quantiles of `count` measurements, in seconds."""

    count: int
    mean: float
    p50: float
    p99: float


class Histogram(NamedTuple):
    """Upper bounds of buckets, in seconds, and how many measurements were at most that; and the sum of all."""

    buckets: tuple[tuple[float, float], ...] = ()
    total: float = 0.0


EMPTY = Histogram()


@dataclass(frozen=True, slots=True)
class FrontendLoad:
    """The frontend's metrics, from its /metrics page."""

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
    #: The current strategy; empty where it could not be read.
    strategy: str
    #: What is wrong with the whole snapshot, such as an `up` that is gone.
    doubt: str
    processes: tuple[Process, ...]
    frontend: FrontendLoad
    #: Lines of the workers' logs since the last look that are warnings or errors, "worker: text".
    warnings: tuple[str, ...] = ()


def latency(now: Histogram, before: Histogram = EMPTY) -> Latency | None:
    """The latency of the measurements since `before`; None without any."""
    old = dict(before.buckets)
    counts = [(bound, count - old.get(bound, 0.0)) for bound, count in now.buckets]
    count = counts[-1][1] if counts else 0.0
    if count <= 0:
        return None
    mean = (now.total - before.total) / count
    return Latency(int(count), mean, _quantile(counts, 0.5), _quantile(counts, 0.99))


def _quantile(counts: list[tuple[float, float]], share: float) -> float:
    """As Prometheus' histogram_quantile does: linear inside a bucket, the last finite bound beyond it."""
    rank = share * counts[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower
