"""One page of charts: speed beside the peers, shares of the hardware, growth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from trtllm_disagg.bench.engine.contestants import CONTESTANTS
from trtllm_disagg.bench.engine.results import Results
from trtllm_disagg.bench.engine.scaling import Curve, Scaling
from trtllm_disagg.bench.engine.speed import Speeds, decode_of

_COLUMNS = 4
_PANEL_INCHES = (4.6, 3.1)
_COLORS = dict(zip(CONTESTANTS, ("#d62728", "#1f77b4", "#2ca02c", "#9467bd"), strict=True))
_BAR_GROUP = 0.84

Panel = tuple[str, Callable[[Any], None]]


def draw(results: Results, path: Path) -> None:
    """Rows of panels; what was not measured is not there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for panels in (_speed_panels(results), _growth_panels(results)) for panel in panels]
    rows = max(1, -(-len(panels) // _COLUMNS))
    figure, axes = pyplot.subplots(
        rows, _COLUMNS, figsize=(_PANEL_INCHES[0] * _COLUMNS, _PANEL_INCHES[1] * rows), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, paint) in zip(axes.flat, panels, strict=False):
        axis.set_title(title, fontsize=10)
        axis.tick_params(labelsize=8)
        paint(axis)
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    contestants = {name: handles[name] for name in CONTESTANTS if name in handles}
    if contestants:
        figure.legend(contestants.values(), contestants.keys(), loc="upper right", ncols=len(contestants))
    figure.suptitle("trtllm-disagg bench engine", x=0.01, ha="left", fontsize=13)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, format="png", dpi=110)
    pyplot.close(figure)


def _speed_panels(results: Results) -> list[Panel]:
    """A row a size: each test, all dtypes and threads."""
    panels: list[Panel] = []
    for size, group in groupby(results.speeds, key=lambda speeds: speeds.size.name):
        several = list(group)
        panels += [
            (f"{size} {test}, tokens a second", lambda axis, s=several, t=test: _bars(axis, s, t))  # type: ignore[misc]
            for test in several[0].rates
        ]
    if results.speeds:
        panels.append(("share of the hardware's rate, %", lambda axis: _shares(axis, results.speeds)))
    return panels


def _bars(axis: Any, several: list[Speeds], test: str) -> None:
    """Groups by dtype and threads, each as high as its fastest: what matters is who is faster."""
    for place, speeds in enumerate(several):
        rates = {name: speeds.rate(test, name).median for name in speeds.rates[test]}
        width = _BAR_GROUP / len(rates)
        for number, (name, rate) in enumerate(rates.items()):
            x = place + (number - (len(rates) - 1) / 2) * width
            axis.bar(x, rate, width, color=_COLORS[name], label=name)
    axis.set_xticks(range(len(several)), [_short(speeds) for speeds in several])
    axis.set_ylim(bottom=0)


def _shares(axis: Any, several: list[Speeds]) -> None:
    for place, speeds in enumerate(several):
        axis.bar(place - 0.2, speeds.prefill_share().median, 0.4, color="#555555", label="prefill / product")
        if decode_of(1) in speeds.rates:
            axis.bar(place + 0.2, speeds.read_share().median, 0.4, color="#ff7f0e", label="decode b1 / read")
    axis.set_ylim(0, 1.35 * axis.get_ylim()[1])  # room for the legend
    labels = [f"{speeds.size.name}\n{_short(speeds)}" for speeds in several]
    axis.set_xticks(range(len(several)), labels, fontsize=7)
    _legend(axis)


def _growth_panels(results: Results) -> list[Panel]:
    panels: list[Panel] = []
    for scaling in results.scalings:
        name = scaling.name
        panels += [
            (f"{name}: step against batch, ms", _line(scaling.batch, "rows", 1e3)),
            (f"{name}: step against context, ms", _line(scaling.context, "tokens a row", 1e3)),
            (f"{name}: step against the pool, ms", _line(scaling.pool, "KV blocks", 1e3)),
            ("a KV block's cost against the pool, us", _costs(scaling)),
        ]
    return panels


def _line(curve: Curve, label: str, factor: float) -> Callable[[Any], None]:
    return lambda axis: _plot(axis, {"": curve}, label, factor)


def _costs(scaling: Scaling) -> Callable[[Any], None]:
    curves = {"lookup": scaling.lookup, "allocation": scaling.allocation}
    return lambda axis: _plot(axis, curves, "KV blocks", 1e6)


def _plot(axis: Any, curves: Mapping[str, Curve], label: str, factor: float) -> None:
    highest, ticks = 0.0, list[int]()
    for name, curve in curves.items():
        heights = [factor * seconds for seconds in curve.points.values()]
        axis.plot(list(curve.points), heights, marker="o", markersize=4, label=name or None)
        highest = max(highest, *heights)
        ticks = list(curve.points)
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(0, 1.12 * highest)
    axis.set_xlabel(label, fontsize=8)
    axis.grid(alpha=0.3)
    if len(curves) > 1:
        _legend(axis)


def _short(speeds: Speeds) -> str:
    return f"{ {'float32': 'fp32', 'bfloat16': 'bf16'}[speeds.dtype] } {speeds.threads}t"


def _legend(axis: Any) -> None:
    """Each label once."""
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axis.legend(unique.values(), unique.keys(), fontsize=8)
