"""Draws measured numbers as bars: docs/pictures/data/NAME.json as docs/pictures/NAME.svg.

python -m tools.bars
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
_LEFT, _BARS, _RIGHT, _TOP, _BAR, _GAP = 120, 520, 80, 64, 18, 14
_COLOURS = ("#2a78b8", "#a86508", "#3f7f3f", "#9a6fb0", "#b6c2cd")
_STYLE = (
    "text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #24292f } "
    ".head { font-weight: bold } .quiet { fill: #6e7781 } .inside { fill: #ffffff }"
)


class Chart(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    #: What measured the numbers, when and where.
    source: str
    #: True: a group is one bar with parts, and all bars have one scale. False: each group has its own scale.
    is_stacked: bool
    groups: dict[str, dict[str, float]]


def svg(chart: Chart) -> str:
    names = list(next(iter(chart.groups.values())))
    rows = 1 if chart.is_stacked else len(names)
    height = _TOP + len(chart.groups) * (rows * _BAR + _GAP) + 34
    # A letter of 12 pixels is 7.3 pixels wide.
    width = max(_LEFT + _BARS + _RIGHT, 16 + 7.3 * max(len(chart.title), len(chart.source)))
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(8, 18, chart.title, "head"),
        *_legend(names),
        *_groups(chart, rows),
        _text(8, height - 12, chart.source, "quiet"),
        "</svg>\n",
    ]
    return "\n".join(lines)


def _legend(names: list[str]) -> Iterator[str]:
    x = float(_LEFT)
    for name, colour in zip(names, _COLOURS, strict=False):
        yield _bar(x, 32, 12, colour, 12)
        yield _text(x + 17, 43, name)
        x += 17 + 7.3 * len(name) + 22


def _groups(chart: Chart, rows: int) -> Iterator[str]:
    totals = {group: sum(parts.values()) for group, parts in chart.groups.items()}
    y = _TOP
    for group, parts in chart.groups.items():
        yield _text(8, y + 13, group)
        scale = _BARS / (max(totals.values()) if chart.is_stacked else max(parts.values()))
        x = float(_LEFT)
        for row, (value, colour) in enumerate(zip(parts.values(), _COLOURS, strict=False)):
            length = value * scale
            if chart.is_stacked:
                yield _bar(x, y, length, colour)
                yield _text(x + 6, y + 13, f"{value:g}", "inside")
                x += length
            else:
                yield _bar(_LEFT, y + row * _BAR, length, colour)
                yield _text(_LEFT + length + 6, y + row * _BAR + 13, f"{value:g}")
        if chart.is_stacked:
            yield _text(x + 6, y + 13, f"{totals[group]:g}")
        y += rows * _BAR + _GAP


def _bar(x: float, y: float, length: float, colour: str, height: float = _BAR - 2) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'


def pictures() -> dict[Path, str]:
    """The SVG of each picture, by its path."""
    return {
        FOLDER / f"{data.stem}.svg": svg(msgspec.json.decode(data.read_bytes(), type=Chart))
        for data in sorted((FOLDER / "data").glob("*.json"))
    }


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
