"""Draws the charts of a report, each as a PNG and as an SVG that takes its colours from the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_disagg.tools.bench.strategies.measures import (
    PARTS,
    MeasuredPoint,
    ParetoPoint,
    Quantity,
    Slo,
    pareto_front,
)
from trtllm_disagg.tools.bench.strategies.records import NOMINAL
from trtllm_disagg.tools.bench.strategies.sweep import ENOUGH_IN_TIME, Sweep

_SIZE = (5.0, 3.5)
#: Distinct on white and on black, and for any kind of colour vision; markers differ, too.
_COLORS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
_MARKERS = "osD^vPX*<>"
#: Lines of arms that are alike overlap; each is visible between the dashes of the next.
_DASHES = ("-", (0, (5, 3)), (0, (2, 2)))
_INK, _GRID, _PAPER = "#1c2024", "#d9dde2", "#ffffff"
#: The CSS variables that replace these colours in a page, which may be light or dark.
_PAGE_COLORS = {_INK: "var(--ink)", _GRID: "var(--grid)", _PAPER: "var(--paper)"}
_TIMELINE_SLICES = 160
#: The hit rate chart is left out if no arm reaches this share of prompt tokens.
_SHOWN_HITS = 0.01


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    title: str
    #: What the chart shows and how to read it.
    caption: str
    #: Draws on a matplotlib axis.
    draw: Callable[[Any], None]

    def render(self, png: Path) -> str:
        """Saves it, and returns it as an SVG for a page that sets --ink, --grid and --paper."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        with pyplot.rc_context(_STYLE):
            figure, axis = pyplot.subplots(figsize=_SIZE, layout="constrained")
            self.draw(axis)
            axis.set_title(self.title, loc="left", fontsize=10)
            handles, labels = axis.get_legend_handles_labels()
            if labels:
                columns = min(3, len(labels))
                figure.legend(
                    handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
                )
            # The layout is computed once for both files: it takes as long as drawing.
            figure.get_layout_engine().execute(figure)
            figure.set_layout_engine("none")
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", metadata={"Date": None})
            figure.savefig(png, format="png", dpi=150)
            pyplot.close(figure)
        return self._for_page(drawn.getvalue())

    def _for_page(self, svg: str) -> str:
        """The SVG without prologue, metadata and fixed size, and with ids that are unique in a page."""
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        svg = re.sub(r'\bid="|url\(#|href="#', lambda name: f"{name[0]}{self.name}-", svg)
        label = f'role="img" aria-label="{self.title}"'
        svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', label, svg, count=1)
        for color, variable in _PAGE_COLORS.items():
            svg = svg.replace(color, variable)
        return svg


_STYLE = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color"),
        _INK,
    ),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), _PAPER),
    "grid.color": _GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "font.family": "sans-serif",
    # Text stays text: it can be read out, found and copied.
    "svg.fonttype": "none",
    # The same drawing gives the same file.
    "svg.hashsalt": "strategies",
}


def charts_of(sweep: Sweep, slo: Slo) -> list[Chart]:
    return [chart for chart in _every(sweep, slo) if chart is not None]


def _every(sweep: Sweep, slo: Slo) -> Iterator[Chart | None]:
    yield _goodput(sweep, slo)
    yield _pareto(sweep)
    yield _parts(sweep)
    for quantity in ("ttft", "tpot"):
        for percent in sweep.percentiles:
            yield _latency(sweep, quantity, percent, slo)
    yield _hit_rate(sweep)
    yield _timeline(sweep)


def _named(sweep: Sweep, name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{sweep.name}-{name}".lower())


def _arms(sweep: Sweep) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, arm in enumerate(sweep.arms):
        # Shifted by one in every round, so that arms of one colour have different markers.
        rounds, place = divmod(number, len(_COLORS))
        yield (
            arm.name,
            {
                "color": _COLORS[place],
                "marker": _MARKERS[(place + rounds) % len(_MARKERS)],
                "ls": _DASHES[number % len(_DASHES)],
            },
        )


def _over_rate(axis: Any, sweep: Sweep, value: Callable[[MeasuredPoint], float]) -> None:
    """Draws a line for each arm, bars from its lowest to its highest repetition, and the band as a shade."""
    for arm, look in _arms(sweep):
        lines = {variant: _by_rate(sweep, arm, value, variant) for variant in sweep.variants}
        nominal = lines.get(NOMINAL, {})
        if not nominal:
            continue
        middle = [float(np.median(values)) for values in nominal.values()]
        below = [m - min(v) for m, v in zip(middle, nominal.values(), strict=True)]
        above = [max(v) - m for m, v in zip(middle, nominal.values(), strict=True)]
        axis.errorbar(
            list(nominal), middle, (below, above), label=arm, **look, markersize=4, lw=1.4, capsize=2
        )
        # Each side of the band has its own rates, so its line is interpolated.
        grid = list(nominal)
        sides = [
            np.interp(grid, list(line), [float(np.median(v)) for v in line.values()], math.nan, math.nan)
            for line in lines.values()
            if line
        ]
        if len(sides) > 1:
            low, high = np.fmin.reduce(sides), np.fmax.reduce(sides)
            axis.fill_between(grid, low, high, color=look["color"], alpha=0.13, lw=0)
        for variant, line in lines.items():
            if variant != NOMINAL and len(line) == 1:
                axis.plot(
                    list(line),
                    *line.values(),
                    ls="",
                    marker=look["marker"],
                    color=look["color"],
                    ms=4,
                    alpha=0.4,
                )
    axis.set_xlabel("requests/s that arrive")
    axis.set_xlim(left=0)


def _by_rate(
    sweep: Sweep, arm: str, value: Callable[[MeasuredPoint], float], variant: Any = NOMINAL
) -> dict[float, list[float]]:
    values: dict[float, list[float]] = {}
    for curve in sweep.curves(arm, variant).values():
        for rate, measured in curve.items():
            number = value(measured)
            if not math.isnan(number):
                values.setdefault(rate, []).append(number)
    return dict(sorted(values.items()))


def _spread(sweep: Sweep) -> str:
    """The part of a caption that explains repetitions and band."""
    rates = [
        max((len(curve) for arm in sweep.arms for curve in sweep.curves(arm.name, side).values()), default=0)
        for side in sweep.variants
        if side != NOMINAL
    ]
    told = ["Bars: the repetitions."] if any(len(sweep.curves(arm.name)) > 1 for arm in sweep.arms) else []
    if rates:
        drawn = "Shade" if max(rates) > 1 else "Faint marks"
        told.append(f"{drawn}: all step times of prefill, or of decode, shorter and longer.")
    return " ".join(told)


def _goodput(sweep: Sweep, slo: Slo) -> Chart:
    def draw(axis: Any) -> None:
        highest = max(sweep.rates)
        axis.plot([0, highest], [0, highest], ls=":", lw=1, color=_INK)
        _over_rate(axis, sweep, lambda measured: measured.goodput(slo).requests_s)
        for arm, look in _arms(sweep):
            knee = sweep.knee(arm, slo)
            if knee:
                axis.plot(
                    [knee],
                    [sweep.goodput(arm, knee, slo)],
                    "o",
                    ms=12,
                    mfc="none",
                    mec=look["color"],
                    mew=1.5,
                )
        axis.set_ylabel("requests/s in time")
        axis.set_ylim(bottom=0)

    caption = (
        f"Requests that keep {slo}. Higher is better; on the dotted line every request is in time. A ring marks the "
        f"knee: up to there {ENOUGH_IN_TIME:.0%} are. {_spread(sweep)}"
    )
    return Chart(_named(sweep, "goodput"), "Goodput", caption, draw)


def _pareto(sweep: Sweep) -> Chart:
    def draw(axis: Any) -> None:
        for arm, look in _arms(sweep):
            for variant in sweep.variants:
                places = _places(sweep, arm, variant)
                front = pareto_front(places)
                if not front:
                    continue
                xs, ys = [0.0, *(x for x, _ in front)], [front[0][1], *(y for _, y in front)]
                if variant == NOMINAL:
                    axis.step([*xs, xs[-1]], [*ys, 0], where="pre", color=look["color"], lw=1.4)
                    axis.plot(*zip(*places, strict=True), markersize=5, label=arm, **(look | {"ls": ""}))
                else:
                    axis.step([*xs, xs[-1]], [*ys, 0], where="pre", color=look["color"], lw=0.7, alpha=0.3)
        axis.set_xlabel("tok/s/user (1000 / TPOT p50)")
        axis.set_ylabel("tok/s/GPU, over all GPUs")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)

    caption = (
        "Each mark is one rate: to the right each reader gets tokens faster, upwards each GPU makes more of them. The "
        "line is the best that an arm can do; the arm with the line further out is better. Thin lines: the "
        "sensitivity band."
    )
    return Chart(_named(sweep, "pareto"), "Speed for a user against work of a GPU", caption, draw)


def _places(sweep: Sweep, arm: str, variant: Any) -> list[ParetoPoint]:
    """The points by rate; empty if tokens took no time, as on the recording engine."""
    users = _by_rate(sweep, arm, lambda measured: measured.pareto_point[0], variant)
    gpus = _by_rate(sweep, arm, lambda measured: measured.pareto_point[1], variant)
    return [(float(np.median(users[rate])), float(np.median(gpus[rate]))) for rate in users]


def _latency(sweep: Sweep, quantity: Quantity, percent: int, slo: Slo) -> Chart:
    def draw(axis: Any) -> None:
        _over_rate(axis, sweep, lambda measured: measured.percentile(quantity, percent))
        limit = slo.limits.get(quantity)
        if limit is not None:
            axis.axhline(limit, ls=":", lw=1, color=_INK)
        if quantity == "ttft":
            _plain_log(axis)
        else:
            axis.set_ylim(bottom=0)
        axis.set_ylabel("ms, logarithmic" if quantity == "ttft" else "ms")

    what = {"ttft": "time to the first token", "tpot": "time of each further token"}[quantity]
    caption = f"Lower is better: {what}, {_shown_percent(percent)}. Dotted: the SLO. {_spread(sweep)}"
    return Chart(_named(sweep, f"{quantity}-p{percent}"), f"{quantity.upper()} p{percent}", caption, draw)


def _plain_log(axis: Any) -> None:
    """A logarithmic axis with the ticks 1, 2, 5, 10, ..."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _shown_percent(percent: int) -> str:
    return {50: "half of the requests are faster"}.get(percent, f"{100 - percent} in 100 requests are slower")


def _parts(sweep: Sweep) -> Chart | None:
    rate = sweep.calm_rate
    shares = {
        arm.name: told
        for arm in sweep.arms
        if (told := [m.mean_parts for m in sweep.at_rate(arm.name, rate) if m.mean_parts])
    }
    if not shares:
        return None
    # Without decode, which is the largest part of every arm and would hide the others.
    shown = PARTS[:-1]

    def draw(axis: Any) -> None:
        left = np.zeros(len(shares))
        for part, color in zip(shown, _COLORS, strict=False):
            widths = np.array([np.median([told[part] for told in each]) for each in shares.values()])
            axis.barh(list(shares), widths, left=left, color=color, label=part.replace("_", " "), height=0.6)
            left += widths
        totals = [[sum(told[part] for part in shown) for told in each] for each in shares.values()]
        for place, values in enumerate(totals):
            axis.plot([min(values), max(values)], [place, place], color=_INK, lw=1.5)
        axis.invert_yaxis()
        axis.set_xlabel("ms of a request on average")

    caption = (
        f"A request at {rate:g} requests/s, on average, without the steps of decode, which are in TPOT. Shorter is "
        "better. Line at the end: the repetitions."
    )
    return Chart(_named(sweep, "parts"), "Where a request's time went", caption, draw)


def _hit_rate(sweep: Sweep) -> Chart | None:
    def hit_rate(measured: MeasuredPoint) -> float:
        rate = measured.result.kv_hit_rate
        return math.nan if rate is None else rate

    rates = [_by_rate(sweep, arm.name, hit_rate) for arm in sweep.arms]
    if not any(rate >= _SHOWN_HITS for by_rate in rates for each in by_rate.values() for rate in each):
        return None

    def draw(axis: Any) -> None:
        _over_rate(axis, sweep, hit_rate)
        axis.set_ylim(0, 1)
        axis.set_ylabel("share of prompt tokens")

    caption = f"Prompt tokens that a prefix cache had; higher is better. {_spread(sweep)}"
    return Chart(_named(sweep, "hit-rate"), "KV hit rate", caption, draw)


def _timeline(sweep: Sweep) -> Chart | None:
    rate = sweep.calm_rate
    firsts = {arm.name: at_rate[0] for arm in sweep.arms if (at_rate := sweep.at_rate(arm.name, rate))}
    lines = {name: line for name, measured in firsts.items() if (line := _longest_gaps(measured))}
    if not lines:
        return None
    arrivals = _long_prompts(next(iter(firsts.values())))

    def draw(axis: Any) -> None:
        looks = dict(_arms(sweep))
        for name, (seconds, gaps) in lines.items():
            axis.plot(seconds, gaps, color=looks[name]["color"], lw=1, label=name)
        axis.set_ylim(bottom=0)
        axis.vlines(arrivals, 0, 0.04 * axis.get_ylim()[1], lw=0.8, color=_INK)
        axis.set_xlim(left=0)
        axis.set_xlabel("seconds")
        axis.set_ylabel("longest gap, ms")

    caption = (
        f"The longest pause between two pieces of an answer that any reader saw, through a run at {rate:g} requests/s "
        "(the first repetition). Ticks below: a long prompt arrives. Peaks above them: prefill holds up decode."
    )
    return Chart(_named(sweep, "gaps"), "Gaps between tokens while long prompts arrive", caption, draw)


def _longest_gaps(measured: MeasuredPoint) -> tuple[Sequence[float], Sequence[float]] | None:
    """The longest gap that ended in each slice of the run."""
    width = measured.result.duration_s / _TIMELINE_SLICES
    longest = np.full(_TIMELINE_SLICES, math.nan)
    for request in measured.result.answered:
        if request.ttft_ms is None or not request.gaps_ms:
            continue
        gaps = np.array(request.gaps_ms)
        ends = request.arrival_s + (request.ttft_ms + np.cumsum(gaps)) / 1000
        slices = np.clip((ends / width).astype(int), 0, _TIMELINE_SLICES - 1)
        np.fmax.at(longest, slices, gaps)
    if np.isnan(longest).all():
        return None
    return list((np.arange(_TIMELINE_SLICES) + 0.5) * width), list(longest)


def _long_prompts(measured: MeasuredPoint) -> list[float]:
    """Arrival times of the longest tenth of the prompts; of all prompts if they are equally long."""
    requests = measured.result.requests
    long = float(np.percentile([request.input_tokens for request in requests], 90))
    return [request.arrival_s for request in requests if request.input_tokens >= long]
