"""What is measured (samples), and what a benchmark says in --json: a list of {figure, value, unit, target, ok}."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Figure:
    """`ok` says whether `value` meets `target`; both are None for a figure without a target."""

    figure: str
    value: float
    unit: str
    target: str | None = None
    ok: bool | None = None

    @property
    def missed(self) -> bool:
        return self.ok is False

    def unjudged(self) -> Figure:
        """Of a run that is too short to be held to a target."""
        return replace(self, target=None, ok=None)


def at_least(figure: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(figure, value, unit, f">= {bound:g}", bool(value >= bound))


def at_most(figure: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(figure, value, unit, f"<= {bound:g}", bool(value <= bound))


def exactly(figure: str, value: float, unit: str, wanted: float) -> Figure:
    return Figure(figure, value, unit, f"== {wanted:g}", bool(value == wanted))


def to_json(figures: Iterable[Figure]) -> str:
    """Values with four significant digits: more would be noise."""
    rounded = [asdict(figure) | {"value": float(f"{figure.value:.4g}")} for figure in figures]
    return json.dumps(rounded, indent=1)


@dataclass(frozen=True, slots=True)
class Sample:
    """One quantity, measured several times."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float], factor: float = 1.0) -> Sample:
        return cls(tuple(factor * value for value in values))

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median; 0 for a single value."""
        low, high = np.percentile(self.values, (25, 75))
        return float((high - low) / self.median) if self.median else 0.0


def paired_ratio(numerators: Iterable[float], denominators: Iterable[float], factor: float = 1.0) -> Sample:
    """Each measurement over its neighbour in time, so that a slow minute weighs on both."""
    return Sample.of((a / b for a, b in zip(numerators, denominators, strict=True)), factor)
