"""Chooses the rates at which arms are measured, from their simulated knees (simulation.py), in requests a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: As shares of the best arm's knee.
_SWEEP = (0.15, 0.35, 0.55, 0.75, 0.9, 1.05, 1.25)
#: In a quick run, as shares of a knee: a calm rate; one below the knee by as much as the simulation may be wrong; and
#: one above it.
_CALM, _BELOW, _ABOVE = 0.5, 0.85, 1.3
#: On a side of the band, around the knees of arms that are near each other. A rate above the knees alone would compare
#: small numbers: next to nothing is in time there.
_JUST_BELOW, _JUST_ABOVE = 0.9, 1.1
#: Arms with knees that differ by a smaller factor are near each other: one rate is below all knees.
_NEAR = 1.3
#: A real knee may be so many times the simulated one: where prompts share prefixes and lengths vary, an arm had all
#: answers in time above it.
_MOST_ERROR = 1.5


def sweep(knees: Mapping[str, float]) -> tuple[float, ...]:
    return _rounded(share * max(knees.values()) for share in _SWEEP)


def quick_sweep(knees: Mapping[str, float]) -> tuple[float, ...]:
    low, high = min(knees.values()), max(knees.values())
    lowest = _CALM * high if high < _NEAR * low else _BELOW * low
    return _rounded((lowest, _BELOW * high, _ABOVE * high))


def deciding(knees: Mapping[str, float]) -> tuple[float, ...]:
    """The rates for a side of the band: one that only the best arm should sustain; or, if arms are near each other, one
    that all should sustain and one that none should.
    """
    low, high = min(knees.values()), max(knees.values())
    return _rounded((_JUST_BELOW * low, _JUST_ABOVE * high) if high < _NEAR * low else (_BELOW * high,))


def _rounded(rates: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{rate:.2g}") for rate in rates)


def up_to_the_first_above(knee: float, common: tuple[float, ...]) -> tuple[float, ...]:
    """The sorted `common` rates up to and including the first that is surely above the arm's knee."""
    return common[: sum(rate <= _MOST_ERROR * knee for rate in common) + 1]
