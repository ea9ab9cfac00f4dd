"""Measurements (samples, grids of numbers) and how a benchmark reports them (figures, sections)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Figure:
    """One reported number. `ok`: whether it meets `target` (report.py); both are None without a target."""

    figure: str
    value: float
    unit: str
    target: str | None = None
    ok: bool | None = None


def to_json(figures: Iterable[Figure]) -> str:
    """The figures as JSON, with four significant digits: more would be noise."""
    return json.dumps([asdict(figure) | {"value": rounded(figure.value, 4)} for figure in figures], indent=1)


def rounded(number: float, digits: int) -> float:
    """`number` with so many significant digits."""
    return float(f"{number:.{digits}g}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One quantity, measured several times."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float], factor: float = 1.0) -> Sample:
        return cls(tuple(factor * value for value in values))

    @property
    def median(self) -> float:
        import numpy as np

        return float(np.median(self.values))

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median; 0 for a single value."""
        import numpy as np

        low, high = np.percentile(self.values, (25, 75))
        return float((high - low) / self.median) if self.median else 0.0


def paired_ratio(numerators: Iterable[float], denominators: Iterable[float], factor: float = 1.0) -> Sample:
    """Ratios of measurements that are neighbours in time, so that a slow minute affects both."""
    return Sample.of((a / b for a, b in zip(numerators, denominators, strict=True)), factor)


def in_turn(subjects: Sequence[T], number: int) -> list[T]:
    """The subjects in the order of round `number`: each round begins with another one."""
    first = number % len(subjects)
    return [*subjects[first:], *subjects[:first]]


@dataclass(slots=True)
class Rounds:
    """Quantities of several subjects, measured in turns. Values at the same index are of the same round."""

    #: By subject and quantity.
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def subjects(self) -> list[str]:
        return list(self.values)

    def note(self, subject: str, measured: Mapping[str, float]) -> None:
        """Adds one round of `subject`: a value for each quantity."""
        for quantity, value in measured.items():
            self.values.setdefault(subject, {}).setdefault(quantity, []).append(value)

    def sample(self, subject: str, quantity: str) -> Sample:
        return Sample.of(self.values[subject][quantity])

    def ratio(self, quantity: str, subject: str, baseline: str) -> Sample:
        """The ratios subject / baseline, round by round."""
        return paired_ratio(self.values[subject][quantity], self.values[baseline][quantity])

    def medians(self, subject: str) -> dict[str, float]:
        return {quantity: self.sample(subject, quantity).median for quantity in self.values[subject]}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a grid. Without a `unit` its values are shown but are no figures."""

    name: str
    unit: str = ""
    form: str = ".2f"
    header: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of which every number is a figure."""

    title: str
    #: Headers for the names of a row; further names are not shown.
    labels: tuple[str, ...]
    columns: Sequence[Column]
    #: Numbers or texts, by the names of a row and the name of a column.
    rows: Mapping[Any, Mapping[str, Any]]
    #: The format of a figure's name: {0}, {1}, ... for a row's names, and {column}.
    naming: str

    @property
    def figures(self) -> list[Figure]:
        return [
            Figure(self.naming.format(*row, column=column.name), float(cells[column.name]), column.unit)
            for row, cells in self.rows.items()
            for column in self.columns
            if column.unit and column.name in cells
        ]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report: tables, remarks, and the figures that are in no table."""

    title: str = ""
    grids: Sequence[Grid] = ()
    remarks: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    #: Why a target would mean nothing, as a clause; empty where it means something.
    not_judged_because: str = ""

    @property
    def every_figure(self) -> list[Figure]:
        return [*(figure for grid in self.grids for figure in grid.figures), *self.figures]
