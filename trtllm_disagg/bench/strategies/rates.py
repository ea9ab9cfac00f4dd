"""At which rates arms are measured, by what they should be able to do (simulation.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Of the best arm's knee.
_SWEEP = (0.15, 0.35, 0.55, 0.75, 0.9, 1.05, 1.25)
#: Of a quick run: a calm one; below what an arm should be able to do, by as much as that may be wrong; and above.
_CALM, _BELOW, _ABOVE = 0.5, 0.85, 1.3
#: On a side of the band, around what arms that are near each other should be able to do. Above it alone, small numbers
#: would be compared: next to nothing is in time there.
_JUST_BELOW, _JUST_ABOVE = 0.9, 1.1
#: Arms that differ by less are near each other: one rate is below what all are able to do.
_NEAR = 1.3
#: Of a simulated knee: where prompts share their beginnings and lengths vary, an arm had all answers in time
#: above it.
_MOST_ERROR = 1.5


def sweep(knees: Mapping[str, float]) -> tuple[float, ...]:
    return _rounded(share * max(knees.values()) for share in _SWEEP)


def quick_sweep(knees: Mapping[str, float]) -> tuple[float, ...]:
    low, high = min(knees.values()), max(knees.values())
    lowest = _CALM * high if high < _NEAR * low else _BELOW * low
    return _rounded((lowest, _BELOW * high, _ABOVE * high))


def deciding(knees: Mapping[str, float]) -> tuple[float, ...]:
    """For a side of the band: what the best arm should be able to do, and the others not; or what all should be able to
    do, and what none.
    """
    low, high = min(knees.values()), max(knees.values())
    return _rounded((_JUST_BELOW * low, _JUST_ABOVE * high) if high < _NEAR * low else (_BELOW * high,))


def _rounded(rates: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{rate:.2g}") for rate in rates)


def up_to_the_first_above(knee: float, common: tuple[float, ...]) -> tuple[float, ...]:
    """Of the rates of all arms, those of one: a rate that is surely above what it is able to do is the last."""
    # They are sorted, so those that it should manage come first.
    return common[: sum(rate <= _MOST_ERROR * knee for rate in common) + 1]
