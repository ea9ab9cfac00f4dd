"""What is measured (samples, grids of numbers), and what a benchmark says of it (figures, sections of a report)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trtllm_disagg.bench.plot import Bars, Panel


@dataclass(frozen=True, slots=True)
class Figure:
    """`ok` says whether `value` meets `target` (report.py); both are None for a figure without a target."""

    figure: str
    value: float
    unit: str
    target: str | None = None
    ok: bool | None = None

    @property
    def missed(self) -> bool:
        return self.ok is False


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
        import numpy as np

        return float(np.median(self.values))

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median; 0 for a single value."""
        import numpy as np

        low, high = np.percentile(self.values, (25, 75))
        return float((high - low) / self.median) if self.median else 0.0


def paired_ratio(numerators: Iterable[float], denominators: Iterable[float], factor: float = 1.0) -> Sample:
    """Each measurement over its neighbour in time, so that a slow minute weighs on both."""
    return Sample.of((a / b for a, b in zip(numerators, denominators, strict=True)), factor)


@dataclass(slots=True)
class Rounds:
    """Quantities of several subjects that were measured in turns. Values at the same place are of the same round."""

    #: By subject and quantity.
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def subjects(self) -> list[str]:
        return list(self.values)

    def note(self, subject: str, measured: Mapping[str, float]) -> None:
        """One round of `subject`: a value for each quantity."""
        for quantity, value in measured.items():
            self.values.setdefault(subject, {}).setdefault(quantity, []).append(value)

    def sample(self, subject: str, quantity: str) -> Sample:
        return Sample.of(self.values[subject][quantity])

    def ratio(self, quantity: str, subject: str, baseline: str) -> Sample:
        """Of the subject to the baseline."""
        return paired_ratio(self.values[subject][quantity], self.values[baseline][quantity])

    def medians(self, subject: str) -> dict[str, float]:
        return {quantity: self.sample(subject, quantity).median for quantity in self.values[subject]}


@dataclass(frozen=True, slots=True)
class Column:
    """Of a grid. What has no `unit` is shown, and is no figure."""

    name: str
    unit: str = ""
    form: str = ".2f"
    header: str = ""
    is_plotted: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of which every number is a figure."""

    title: str
    #: Headers of a row's names; a name beyond these is not shown.
    labels: tuple[str, ...]
    columns: Sequence[Column]
    #: Numbers, or texts, by a row's names and a column's.
    rows: Mapping[Any, Mapping[str, Any]]
    #: A figure's name: a row's names by their place, and {column}.
    naming: str

    @property
    def figures(self) -> list[Figure]:
        return [
            Figure(self.naming.format(*row, column=column.name), float(cells[column.name]), column.unit)
            for row, cells in self.rows.items()
            for column in self.columns
            if column.unit and column.name in cells
        ]

    @property
    def panels(self) -> list[Panel]:
        """Bars in groups by a row's first name, a color for each of its last."""
        return [
            Bars(f"{self.title}: {c.header or c.name}", self._heights(c))
            for c in self.columns
            if c.is_plotted
        ]

    def _heights(self, column: Column) -> dict[str, dict[str, float]]:
        heights: dict[str, dict[str, float]] = {}
        for row, cells in self.rows.items():
            color = row[-1] if len(self.labels) > 1 else ""
            heights.setdefault(color, {})[row[0]] = float(cells[column.name])
        return heights


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report: tables, remarks, and the figures that stand in no table."""

    title: str = ""
    grids: Sequence[Grid] = ()
    remarks: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    panels: Sequence[Panel] = ()
    #: False where a target would mean nothing: other processes had the cores, or the run was too short.
    is_judged: bool = True

    @property
    def every_figure(self) -> list[Figure]:
        return [*(figure for grid in self.grids for figure in grid.figures), *self.figures]

    @property
    def every_panel(self) -> list[Panel]:
        return [*(panel for grid in self.grids for panel in grid.panels), *self.panels]
