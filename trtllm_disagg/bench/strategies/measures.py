"""The numbers of one measured point: percentiles, throughput, goodput; and the Pareto front of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trtllm_disagg.bench.strategies.records import Arm, Parts, PointResult
from trtllm_disagg.bench.strategies.slo import Quantity, Slo

PERCENTILES = (50, 90, 99)
PARTS = ("queue", "prefill", "handoff", "transfer", "decode_wait", "decode")

Numbers = NDArray[np.float64]
#: (tok/s/user, tok/s/GPU): more of either is better.
ParetoPoint = tuple[float, float]


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
        columns: dict[Quantity, list[float | None]] = {
            "ttft": [request.ttft_ms for request in requests],
            "tpot": [request.tpot_ms for request in requests],
            "latency": [request.latency_ms for request in requests],
        }
        return self._columns(columns)

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
    def arrivals_s(self) -> float:
        """Seconds in which requests arrived, by the rate asked for: a few random arrivals have another rate. Goodput
        is divided by this time, so that a long last answer does not lower it.
        """
        return len(self.result.requests) / self.result.point.rate

    def percentile(self, name: Quantity, percent: float) -> float:
        """In milliseconds; NaN where no request has such a time."""
        known = self.times[name][~np.isnan(self.times[name])]
        return float(np.percentile(known, percent)) if known.size else math.nan

    def keeps(self, name: Quantity, limit: float) -> NDArray[np.bool_]:
        return _keeps(self.times, name, limit, self.is_answered)

    def _in_time(self, slo: Slo, times: Mapping[Quantity, Numbers]) -> NDArray[np.bool_]:
        good = self.is_answered.copy()
        for name, limit in slo.limits.items():
            good &= _keeps(times, name, limit, self.is_answered)
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
            requests_s=share * self.result.point.rate,
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
        return {name: _mean(known, name) for name in PARTS} if known else {}


def _keeps(
    times: Mapping[Quantity, Numbers], name: Quantity, limit: float, is_answered: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """An answer of one token has no TPOT, so it keeps every limit of TPOT."""
    kept = times[name] <= limit
    return kept | np.isnan(times["tpot"]) & is_answered if name == "tpot" else kept


def _mean(parts: Iterable[Parts], name: str) -> float:
    return float(np.mean([getattr(part, name) for part in parts]))


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
