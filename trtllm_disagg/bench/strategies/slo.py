"""Service-level objectives: the limits that an answer has to keep to be in time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from trtllm_disagg.errors import ConfigError

Quantity = Literal["ttft", "tpot", "latency"]
#: The names in texts.
LABELS: dict[str, str] = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in milliseconds; None: any time will do."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, text: str, flag: str = "--slo") -> Slo:
        """`text`: as "ttft=500,tpot=30". Raises ConfigError that names the wrong part."""
        names = ", ".join(field.name for field in fields(cls))
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, separator, value = (word.strip() for word in part.partition("="))
            if not separator or name not in names.split(", "):
                raise ConfigError.bad_value(
                    flag, text, f"NAME=MILLISECONDS with names of {names}, as in ttft=500,tpot=30"
                )
            if name in limits:
                raise ConfigError.bad_value(flag, text, f"{name} once")
            limits[name] = _milliseconds(f"{flag} {name}", value)
        return cls(**limits)

    @property
    def limits(self) -> dict[Quantity, float]:
        every: dict[Quantity, float | None] = {
            "ttft": self.ttft,
            "tpot": self.tpot,
            "latency": self.latency,
        }
        return {name: limit for name, limit in every.items() if limit is not None}

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
