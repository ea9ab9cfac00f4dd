"""PNG plots of what was measured; matplotlib comes with the extra `bench`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtllm_disagg.errors import ConfigError

_COLUMNS = 4
_PANEL_INCHES = (4.6, 3.1)
_BAR_GROUP = 0.84
_NOT_MEASURED = math.nan


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars a label: series[name][label] -> height; what is missing has no bar."""

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
    """Growth over something that doubles: curves[name][x] -> y."""

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


def require_matplotlib() -> None:
    """Raise ConfigError before anything is measured, not after."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot: matplotlib is not installed; pip install 'trtllm-disagg[bench]'")


def draw(panels: Sequence[Panel], heading: str, path: Path) -> None:
    """One page, rows of panels."""
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
