"""A reason to draw no conclusion, and what the user can do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trtllm_disagg.bench.strategies.records import Sensitivity


class WantedRate(NamedTuple):
    """A rate at which an arm would show how much it sustains."""

    sensitivity: Sensitivity
    requests_s: float
    #: The highest, or lowest, rate that was compared.
    beyond: float


@dataclass(frozen=True, slots=True)
class Doubt:
    #: A clause, as the report says it.
    why: str
    #: What a user does next: a clause with the flag in it.
    remedy: str
    #: The two arms are equally good, within the precision of the measurement.
    is_tie: bool = False
    #: The rate that is missing; a run that chose its own rates measures it by itself (further.py).
    wanted: WantedRate | None = None

    def __bool__(self) -> bool:
        return bool(self.why)

    def __str__(self) -> str:
        return self.why


NO_DOUBT = Doubt("", "")
GO_ON = "give the same command again, until every point is measured"


def remedies(doubts: Iterable[Doubt]) -> str:
    """The distinct remedies of `doubts`, joined by semicolons."""
    return "; ".join(dict.fromkeys(doubt.remedy for doubt in doubts if doubt.remedy))
