"""Latency limits, and the share of requests that keep them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from trtllm_disagg.errors import ConfigError

Quantity = Literal["ttft", "tpot", "latency"]
QUANTITIES: tuple[Quantity, ...] = ("ttft", "tpot", "latency")
#: Names in texts.
LABELS: dict[str, str] = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
#: A layout keeps the limits when this share of its requests is in time.
ENOUGH_IN_TIME = 0.9
#: Workers may be saturated when a smaller share of the second half's requests ends in it.
_ENDED_SHARE = 0.9
#: Saturated workers take this many times longer for the last quarter than for the second one. The second factor is for
#: a second half shorter than _SHORTLY answers, which few requests can finish.
_GROWTH, _GROWTH_SEEN_SHORTLY = 1.2, 1.5
_SHORTLY = 0.8
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parses "ttft=500,tpot=30". Raises ConfigError that names the wrong part."""
        names = ", ".join(QUANTITIES)
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, separator, value = (word.strip() for word in part.partition("="))
            if not separator or name not in QUANTITIES:
                allowed = f"NAME=MILLISECONDS, with {names}, such as ttft=500,tpot=30"
                raise ConfigError.bad_value("--slo", text, allowed)
            if name in limits:
                raise ConfigError.bad_value("--slo", text, f"{name} once")
            limits[name] = _milliseconds(f"--slo {name}", value)
        return cls(**limits)

    @property
    def limits(self) -> dict[Quantity, float]:
        return {name: limit for name in QUANTITIES if (limit := getattr(self, name)) is not None}

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


#: A chat reader notices neither 0.5 s before an answer nor 33 tokens/s.
DEFAULT_SLO = Slo(ttft=500.0, tpot=30.0)


def slo_of(text: str | None) -> Slo:
    """Parses --slo. Raises ConfigError."""
    return Slo.parse(text) if text else DEFAULT_SLO


def done_share(arrivals: Sequence[float], latencies: Sequence[float]) -> float:
    """1 if the workers kept up with the arrivals, else the share of the second half's requests that ended in it. Both
    sequences: seconds, in order of arrival.
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
