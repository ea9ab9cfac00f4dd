"""Decides from the times of a point's requests whether more arrive than are answered, and what share is answered."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

#: Below this share of the second half's requests that end within it, the workers may be saturated.
_ENDED_SHARE = 0.9
#: Saturated workers take so many times as long for the last quarter as for the second one. The second number is for
#: a second half shorter than _SHORTLY answers, in which few requests end in any case.
_GROWTH, _GROWTH_SEEN_SHORTLY = 1.2, 1.5
_SHORTLY = 0.8
_FEWEST = 8


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
