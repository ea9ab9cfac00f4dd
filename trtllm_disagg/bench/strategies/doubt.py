"""Why something is not concluded, and what to do so that it may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trtllm_disagg.bench.strategies.records import Sensitivity


class WantedRate(NamedTuple):
    """At which an arm would show what it is able to do."""

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
    #: Two arms do alike, by as much as that can be told apart.
    is_tie: bool = False
    #: A run with rates of its own choice measures it by itself (further.py).
    wanted: WantedRate | None = None

    def __bool__(self) -> bool:
        return bool(self.why)

    def __str__(self) -> str:
        return self.why


NO_DOUBT = Doubt("", "")
GO_ON = "give the same command again, until every point is measured"


def remedies(doubts: Iterable[Doubt]) -> str:
    """Each once: "repeat it with --repetitions 3; or ..."."""
    return "; ".join(dict.fromkeys(doubt.remedy for doubt in doubts if doubt.remedy))
