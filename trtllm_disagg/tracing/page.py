"""Traces as pictures: one SVG a request, and a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from trtllm_disagg.tracing.reading import Node, Trace
from trtllm_disagg.tracing.waterfall import conclusions, duration, headline

_ROW, _TOP, _BOTTOM, _BARS, _RIGHT = 18, 52, 34, 560, 90
#: Of the names: where they begin, how far each level is indented, and how wide a letter is.
_NAMES, _INDENT, _LETTER = 112, 9, 7.3
_STYLE = """
svg { font: 12px ui-monospace, Menlo, Consolas, monospace; max-width: 100% } .paper { fill: #ffffff }
text { fill: #24292f } .quiet { fill: #6e7781 } .failed { fill: #cf222e } .head { font-weight: bold }
.ours { fill: #2a78b8 } .others { fill: #b6c2cd } .longest { fill: #e8a213 } .grid { stroke: #e4e8ec }
.first { stroke: #1a7f37 }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ margin: 2em; display: flex; flex-wrap: wrap; gap: 2em; align-items: flex-start }}</style>
</head><body>
{pictures}
</body></html>
"""


def page(traces: Sequence[Trace]) -> str:
    """Beside each other on one scale, as far as the window is wide."""
    longest = max(trace.milliseconds for trace in traces)
    pictures = "\n".join(picture(trace, longest) for trace in traces)
    return _PAGE.format(title=escape(headline(traces[0])), pictures=pictures)


def picture(trace: Trace, scale_ms: float | None = None) -> str:
    """An SVG by itself; its bars are `scale_ms` wide, the request's own time unless said otherwise."""
    return "\n".join(_Picture(trace, scale_ms or trace.milliseconds or 1.0).lines())


class _Picture:
    def __init__(self, trace: Trace, scale_ms: float) -> None:
        self._trace = trace
        self._scale_ms = scale_ms
        ends = (_NAMES + _INDENT * node.depth + _LETTER * len(node.span.name) for node in trace.nodes)
        self._left = max(ends) + 12
        self._width = self._left + _BARS + _RIGHT
        self._conclusions = list(conclusions(trace))
        self._bars_end = _TOP + _ROW * len(trace.nodes)
        self._height = self._bars_end + _BOTTOM + _ROW * (len(self._conclusions) - 1)

    def lines(self) -> Iterator[str]:
        size = f'width="{self._width:.0f}" height="{self._height}" viewBox="0 0 {self._width:.0f} {self._height}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>'
        yield '<rect width="100%" height="100%" class="paper"/>'
        yield _text(8, 18, headline(self._trace), "head")
        yield from self._grid()
        yield from self._rows()
        for place, line in enumerate(self._conclusions):
            yield _text(8, self._bars_end + _BOTTOM - 12 + place * _ROW, line, "")
        yield "</svg>"

    def _x(self, milliseconds: float) -> float:
        return self._left + _BARS * milliseconds / self._scale_ms

    def _grid(self) -> Iterator[str]:
        for part in range(5):
            at = self._scale_ms * part / 4
            yield self._line(at, "grid", "")
            yield _text(self._x(at), _TOP - 14, duration(at), "quiet", "middle")
        if (first := self._trace.first_token_ms) is not None:
            yield self._line(first, "first", "<title>first token</title>")

    def _line(self, milliseconds: float, kind: str, inside: str) -> str:
        x = self._x(milliseconds)
        return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 10}" y2="{self._bars_end}">{inside}</line>'

    def _rows(self) -> Iterator[str]:
        longest = self._trace.blame[0][0] if self._trace.blame else None
        shown = ""
        for place, node in enumerate(self._trace.nodes):
            y = _TOP + place * _ROW
            if node.worker != shown:
                shown = node.worker
                yield _text(8, y + 12, shown[:14], "quiet")
            failed = "failed" if node.span.error is not None else ""
            yield _text(_NAMES + _INDENT * node.depth, y + 12, node.span.name, failed)
            begin = (node.span.start - self._trace.start) / 1e6
            width = max(self._x(node.milliseconds) - self._left, 1.0)
            kind = "longest" if node is longest else "ours" if node.is_ours else "others"
            yield (
                f'<rect class="{kind}" x="{self._x(begin):.1f}" y="{y + 3}" width="{width:.1f}" '
                f'height="{_ROW - 6}" rx="2"><title>{escape(_told(node))}</title></rect>'
            )
            yield _text(self._width - 8, y + 12, duration(node.milliseconds), "quiet", "end")


def _told(node: Node) -> str:
    """What a pointer on the bar shows."""
    attributes = [f"{name}: {value}" for name, value in node.span.attributes.items()]
    events = [f"{event.name} {dict(event.attributes) or ''}".rstrip() for event in node.span.events]
    failed = [] if node.span.error is None else [f"failed: {node.span.error}"]
    return "\n".join(
        [f"{node.worker} {node.span.name} {duration(node.milliseconds)}", *failed, *attributes, *events]
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
