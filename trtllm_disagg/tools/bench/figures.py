"""Measurements (samples, grids of numbers) and how a benchmark reports them (figures, sections, PNG plots; matplotlib
comes with the extra `bench`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from trtllm_disagg.errors import ConfigError

_COLUMNS = 4
_PANEL_INCHES = (4.6, 3.1)
_BAR_GROUP = 0.84
_NOT_MEASURED = math.nan
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
    is_plotted: bool = False


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

    @property
    def panels(self) -> list[Panel]:
        """Bars, grouped by a row's first name and coloured by its last one."""
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
    """A part of a report: tables, remarks, and the figures that are in no table."""

    title: str = ""
    grids: Sequence[Grid] = ()
    remarks: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    panels: Sequence[Panel] = ()
    #: Why a target would mean nothing, as a clause; empty where it means something.
    not_judged_because: str = ""

    @property
    def every_figure(self) -> list[Figure]:
        return [*(figure for grid in self.grids for figure in grid.figures), *self.figures]

    @property
    def every_panel(self) -> list[Panel]:
        return [*(panel for grid in self.grids for panel in grid.panels), *self.panels]


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars for each label: series[name][label] -> height; a missing height has no bar."""

    title: str
    series: Mapping[str, Mapping[str, float]]

    def paint(self, axis: Any) -> None:
        labels = list(dict.fromkeys(label for heights in self.series.values() for label in heights))
        width = _BAR_GROUP / len(self.series)
        for number, (name, heights) in enumerate(self.series.items()):
            places = [i + (number - (len(self.series) - 1) / 2) * width for i in range(len(labels))]
            axis.bar(places, [heights.get(label, _NOT_MEASURED) for label in labels], width, label=name)
        axis.set_xticks(range(len(labels)), labels, fontsize=7)


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over a logarithmic x axis: curves[name][x] -> y."""

    title: str
    x_label: str
    curves: Mapping[str, Mapping[int, float]]

    def paint(self, axis: Any) -> None:
        for name, points in self.curves.items():
            axis.plot(list(points), list(points.values()), marker="o", markersize=4, label=name)
        ticks = list(next(iter(self.curves.values())))
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel(self.x_label, fontsize=8)
        axis.grid(alpha=0.3)


Panel = Bars | Lines


def require_packages(what: str, *packages: str) -> None:
    """Raises ConfigError if a package that `what` needs is missing. Called before anything is measured."""
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(f"{what}: {package} is not installed; pip install 'trtllm-disagg[bench]'")


def draw(panels: Sequence[Panel], heading: str, path: Path) -> None:
    """Draws the panels in rows on one page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(_COLUMNS, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    size = _PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        panel.paint(axis)
        axis.set_title(panel.title, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.set_ylim(0, 1.35 * axis.get_ylim()[1])  # room for the legend
        if any(axis.get_legend_handles_labels()[1]):
            axis.legend(fontsize=7)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=13)
    figure.savefig(path, format="png", dpi=110)
    pyplot.close(figure)
