"""Draws charts as SVG that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c564b")
_GREY, _LIGHT = "#888888", "#e5e5e5"
#: Edges of the area with the points, width of the chart, and height of a name, which can make the chart higher.
_LEFT, _TOP, _RIGHT, _BOTTOM, _WIDTH, _NAME = 70, 46, 620, 286, 860, 18
_SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="{}" height="{}" y="{}" font-family="sans-serif" font-size="12">'


@dataclass(frozen=True, slots=True)
class Chart:
    """One line per name, and one grey guide line."""

    title: str
    x: str
    y: str
    points: Mapping[str, Sequence[Point]]
    guide: tuple[str, Sequence[Point]]

    @property
    def height(self) -> int:
        return max(_BOTTOM, _TOP + _NAME * (len(self.points) + 1)) + 54

    def svg(self, top: int = 0) -> str:
        return f"{_SVG.format(_WIDTH, self.height, top)}{''.join(self._parts())}</svg>\n"

    def _parts(self) -> Iterator[str]:
        known = [point for points in (*self.points.values(), self.guide[1]) for point in points]
        x_ticks, y_ticks = (_ticks(max(values)) for values in zip(*known, strict=True))

        def place(point: Point) -> Point:
            x, y = point[0] / x_ticks[-1], point[1] / y_ticks[-1]
            return _LEFT + (_RIGHT - _LEFT) * x, _BOTTOM - (_BOTTOM - _TOP) * y

        yield f'<rect width="100%" height="100%" fill="white"/>{_text((10, 18), self.title, "font-weight:bold")}'
        for tick in x_ticks:
            x, _ = place((tick, 0))
            yield _line([(x, _TOP), (x, _BOTTOM)], _LIGHT)
            yield _text((x, _BOTTOM + 18), f"{tick:g}", "text-anchor:middle")
        for tick in y_ticks:
            _, y = place((0, tick))
            yield _line([(_LEFT, y), (_RIGHT, y)], _LIGHT)
            yield _text((_LEFT - 8, y + 4), f"{tick:g}", "text-anchor:end")
        yield _text(((_LEFT + _RIGHT) / 2, _BOTTOM + 40), self.x, "text-anchor:middle")
        yield _text((10, _TOP - 10), self.y)
        name, points = self.guide
        key = _TOP + _NAME * len(self.points)
        yield _line([*map(place, points)], _GREY, "4 4") + _text((_RIGHT + 36, key + 4), name)
        yield _line([(_RIGHT + 16, key), (_RIGHT + 32, key)], _GREY, "4 4")
        for number, (name, points) in enumerate(self.points.items()):
            again, place_of_colour = divmod(number, len(_COLOURS))
            colour = _COLOURS[place_of_colour]
            fill, key = "white" if again else colour, _TOP + _NAME * number
            yield _line([*map(place, points)], colour, "6 3" if again else "none")
            yield _dot((_RIGHT + 24, key), colour, fill, name) + _text((_RIGHT + 36, key + 4), name)
            for point in points:
                yield _dot(place(point), colour, fill, f"{name}: {point[0]:.3g}, {point[1]:.3g}")


def picture(charts: Sequence[Chart]) -> str:
    """One SVG file, with the charts below each other."""
    parts, top = [], 0
    for chart in charts:
        parts.append(chart.svg(top))
        top += chart.height
    return f"{_SVG.format(_WIDTH, top, 0)}\n{''.join(parts)}</svg>\n"


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 to at least `highest`."""
    rough = (highest or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [number * step for number in range(math.ceil((highest or 1.0) / step - 1e-9) + 1)]


def _text(at: Point, text: str, style: str = "") -> str:
    return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" style="{style}">{escape(text)}</text>'


def _line(points: Sequence[Point], colour: str, dashes: str = "none") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-dasharray="{dashes}"/>'


def _dot(at: Point, colour: str, fill: str, title: str) -> str:
    circle = f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4" stroke="{colour}" fill="{fill}">'
    return f"{circle}<title>{escape(title)}</title></circle>"
