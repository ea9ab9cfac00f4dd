"""The numbers of one measured point: percentiles, throughput, goodput under an SLO, saturation; and the Pareto front of
several points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.strategies.records import Arm, Parts, PointResult

PERCENTILES = (50, 90, 99)
PARTS = ("queue", "prefill", "handoff", "transfer", "decode_wait", "decode")
#: Below this share of the second half's requests that end within it, the workers may be saturated.
_ENDED_SHARE = 0.9
#: Saturated workers take so many times as long for the last quarter as for the second one. The second number is for
#: a second half shorter than _SHORTLY answers, in which few requests end in any case.
_GROWTH, _GROWTH_SEEN_SHORTLY = 1.2, 1.5
_SHORTLY = 0.8
_FEWEST = 8
#: The smallest share of a rate that counts as that rate.
LEAST_SENT = 0.95

Quantity = Literal["ttft", "tpot", "latency"]
QUANTITIES: tuple[Quantity, ...] = ("ttft", "tpot", "latency")
#: The names in texts.
LABELS: dict[str, str] = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}

Numbers = NDArray[np.float64]
#: (tok/s/user, tok/s/GPU): more of either is better.
ParetoPoint = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in milliseconds; None: any time will do."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`text`: as "ttft=500,tpot=30". Raises ConfigError that names the wrong part."""
        names = ", ".join(QUANTITIES)
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, separator, value = (word.strip() for word in part.partition("="))
            if not separator or name not in QUANTITIES:
                raise ConfigError.bad_value(
                    "--slo", text, f"NAME=MILLISECONDS with names of {names}, as in ttft=500,tpot=30"
                )
            if name in limits:
                raise ConfigError.bad_value("--slo", text, f"{name} once")
            limits[name] = _milliseconds(f"--slo {name}", value)
        return cls(**limits)

    @property
    def limits(self) -> dict[Quantity, float]:
        return {name: limit for name in QUANTITIES if (limit := getattr(self, name)) is not None}

    def scaled(self, name: Quantity, factor: float) -> Slo:
        return replace(self, **{name: self.limits[name] * factor})

    def __str__(self) -> str:
        return " and ".join(f"{LABELS[name]} {limit:g} ms" for name, limit in self.limits.items())


def _milliseconds(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError.bad_value(key, value, "a number of milliseconds above 0")
    return number


#: A reader of a chat notices neither: half a second until the answer starts, and 33 tokens a second.
DEFAULT_SLO = Slo(ttft=500.0, tpot=30.0)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that keep the whole SLO."""

    #: Their share of all requests, 0 to 1. For a saturated arm at most `PointResult.done_share`: a short run would
    #: otherwise count requests that are only done because no more came.
    share: float
    requests_s: float
    tokens_s_gpu: float


@dataclass(frozen=True)
class MeasuredPoint:
    """A point's requests as columns. NaN: the request failed, or has no such time."""

    result: PointResult
    arm: Arm

    @property
    def gpus(self) -> int:
        return self.arm.gpus

    @cached_property
    def is_answered(self) -> NDArray[np.bool_]:
        return np.array([request.error is None for request in self.result.requests], bool)

    @cached_property
    def output_tokens(self) -> Numbers:
        return np.array([request.output_tokens for request in self.result.requests], float)

    @cached_property
    def times(self) -> dict[Quantity, Numbers]:
        requests = self.result.requests
        return self._columns(
            {name: [getattr(request, f"{name}_ms") for request in requests] for name in QUANTITIES}
        )

    @cached_property
    def modelled_times(self) -> dict[Quantity, Numbers]:
        """The times if our own software took none; as measured where the workers reported no parts."""
        columns: dict[Quantity, list[float | None]] = {"ttft": [], "tpot": [], "latency": []}
        for request in self.result.requests:
            parts = request.parts or Parts()
            first, gaps = parts.before_first_token(self.arm.waits_for_decode), request.output_tokens - 1
            columns["ttft"].append(first if parts.total else None)
            columns["tpot"].append((parts.modelled - first) / gaps if parts.total and gaps > 0 else None)
            columns["latency"].append(parts.modelled if parts.total else None)
        modelled = self._columns(columns)
        return {name: np.where(np.isnan(times), self.times[name], times) for name, times in modelled.items()}

    def _columns(self, columns: Mapping[Quantity, list[float | None]]) -> dict[Quantity, Numbers]:
        # NumPy reads None as NaN.
        return {
            name: np.where(self.is_answered, np.array(column, float), math.nan)
            for name, column in columns.items()
        }

    @property
    def errors(self) -> int:
        return int(np.count_nonzero(~self.is_answered))

    @property
    def sent_requests_s(self) -> float:
        """The rate of arrivals: that of the point, unless the load generator could not send so fast."""
        return self.result.point.rate * (1.0 if self.is_offered else self.result.sent_share)

    @property
    def is_offered(self) -> bool:
        """Whether requests came at the point's rate. An arm keeps up with a slow load generator more easily."""
        return self.result.sent_share >= LEAST_SENT

    @property
    def arrivals_s(self) -> float:
        """Seconds in which requests arrived, by the rate asked for: a few random arrivals have another rate. Goodput
        is divided by this time, so that a long last answer does not lower it.
        """
        return len(self.result.requests) / self.sent_requests_s

    def percentile(self, name: Quantity, percent: float) -> float:
        """In milliseconds; NaN where no request has such a time."""
        known = self.times[name][~np.isnan(self.times[name])]
        return float(np.percentile(known, percent)) if known.size else math.nan

    def keeps(
        self, name: Quantity, limit: float, times: Mapping[Quantity, Numbers] | None = None
    ) -> NDArray[np.bool_]:
        """`times`: by default the measured ones. An answer of one token has no TPOT, so it keeps every limit of it."""
        times = times or self.times
        kept = times[name] <= limit
        return kept | np.isnan(times["tpot"]) & self.is_answered if name == "tpot" else kept

    def _in_time(self, slo: Slo, times: Mapping[Quantity, Numbers]) -> NDArray[np.bool_]:
        good = self.is_answered.copy()
        for name, limit in slo.limits.items():
            good &= self.keeps(name, limit, times)
        return good

    def lost_to_software(self, slo: Slo, name: Quantity) -> float:
        """The share of answers that are late by the limit of `name`, among those that would be in time if our own
        software took none.
        """
        would_be_in_time = self._in_time(slo, self.modelled_times)
        lost = would_be_in_time & ~self.keeps(name, slo.limits[name])
        return int(lost.sum()) / max(1, int(would_be_in_time.sum()))

    def goodput(self, slo: Slo) -> Goodput:
        if not self.result.requests:
            return Goodput(0.0, 0.0, 0.0)
        good = self._in_time(slo, self.times)
        in_time = float(good.mean())
        share = min(in_time, self.result.done_share)
        tokens = float(self.output_tokens[good].sum()) * (share / in_time if in_time else 1.0)
        return Goodput(
            share=share,
            requests_s=share * self.sent_requests_s,
            tokens_s_gpu=tokens / self.arrivals_s / self.gpus,
        )

    @property
    def tokens_s_gpu(self) -> float:
        """Output tokens of all answers, from the first arrival to the last token."""
        return float(self.output_tokens[self.is_answered].sum()) / self.result.duration_s / self.gpus

    @property
    def pareto_point(self) -> ParetoPoint:
        tpot = self.percentile("tpot", 50)
        return 1000 / tpot if tpot > 0 else math.nan, self.tokens_s_gpu

    @property
    def mean_parts(self) -> dict[str, float]:
        """Mean milliseconds of each part of an answer; empty where the workers reported none."""
        known = [request.parts for request in self.result.answered if request.parts is not None]
        if not known:
            return {}
        return {name: float(np.mean([getattr(parts, name) for parts in known])) for name in PARTS}


def pareto_front(places: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    """The points to which no other point is superior in both numbers, by growing tok/s/user."""
    front: list[ParetoPoint] = []
    best = -math.inf
    for x, y in sorted({p for p in places if not any(map(math.isnan, p))}, reverse=True):
        if y > best:
            front.append((x, y))
            best = y
    return front[::-1]


def front_area(places: Iterable[ParetoPoint]) -> float:
    """The area below the Pareto front."""
    area, last_x = 0.0, 0.0
    for x, y in pareto_front(places):
        area += (x - last_x) * y
        last_x = x
    return area


def done_share(arrivals: Sequence[float], latencies: Sequence[float]) -> float:
    """1 if the workers kept up with the arrivals. Otherwise the share of the second half's requests that ended in it.
    Both sequences are in seconds and in the order of arrival.
    """
    count = len(arrivals)
    if count < _FEWEST:
        return 1.0
    middle, last = arrivals[count // 2], arrivals[-1]
    ended = sum(middle < begin + latency <= last for begin, latency in zip(arrivals, latencies, strict=True))
    before = median(latencies[count // 4 : count // 2])
    growth = median(latencies[-(count // 4) :]) / max(before, 1e-9)
    needed = _GROWTH if last - middle >= _SHORTLY * before else _GROWTH_SEEN_SHORTLY
    share = ended / (count - count // 2)
    return share if share < _ENDED_SHARE and growth > needed else 1.0


def sent_share(planned: Sequence[float], sent: Sequence[float]) -> float:
    """The rate at which requests were sent, as a share of the planned one; at most 1. Both sequences are moments, in
    seconds. Requests that are planned for one moment have no rate to fall short of.
    """
    between = max(planned) - min(planned)
    return min(1.0, between / max(max(sent) - min(sent), 1e-9)) if between else 1.0
