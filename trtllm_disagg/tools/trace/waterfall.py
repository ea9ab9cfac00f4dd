"""Draws traces, with one row and one bar for each span: in a terminal, or as a page of SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape

from rich.text import Text

from trtllm_disagg.tools.trace.reading import Node, Trace
from trtllm_disagg.tracing.spans import Value

_LEAST_BAR, _MOST_BAR = 10, 80
_MOST_BLAMED = 3
#: A gap between tokens is shown when it is at least this long, and at least this share of the request.
_LEAST_GAP_MS, _LEAST_GAP_SHARE = 50.0, 0.05
#: The span with the most time of its own, this package's spans, and the others.
Kind = Literal["longest", "ours", "others"]
_STYLES: dict[Kind, str] = {"longest": "bold yellow", "ours": "cyan", "others": "dim"}

_ROW, _TOP, _BOTTOM, _BARS, _RIGHT = 18, 52, 34, 560, 90
#: Pixels: the left end of the names, the indent of each level, and the width of a letter.
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


class Row(NamedTuple):
    """One span of the drawing."""

    #: Empty where the row above has the same one.
    worker: str
    node: Node
    #: Milliseconds after the start of the trace.
    begin: float
    kind: Kind
    is_failed: bool


def rows(trace: Trace) -> Iterator[Row]:
    longest = trace.blame[0][0] if trace.blame else None
    above = ""
    for node in trace.nodes:
        kind: Kind = "longest" if node is longest else "ours" if node.is_ours else "others"
        worker = "" if node.worker == above else node.worker
        yield Row(worker, node, (node.span.start - trace.start) / 1e6, kind, node.span.error is not None)
        above = node.worker


def page(traces: Sequence[Trace]) -> str:
    """A page with all traces on one scale, side by side as far as the window allows."""
    longest = max(trace.milliseconds for trace in traces)
    pictures = "\n".join(picture(trace, longest) for trace in traces)
    return _PAGE.format(title=escape(headline(traces[0])), pictures=pictures)


def picture(trace: Trace, scale_ms: float | None = None) -> str:
    """One SVG; its full width is `scale_ms`, by default the request's own time."""
    return "\n".join(_Picture(trace, scale_ms or trace.milliseconds or 1.0).lines())


class _Picture:
    def __init__(self, trace: Trace, scale_ms: float) -> None:
        self._trace = trace
        self._scale_ms = scale_ms
        ends = (_NAMES + _INDENT * node.depth + _LETTER * len(node.span.name) for node in trace.nodes)
        self._left = max(ends) + 12
        self._width = self._left + _BARS + _RIGHT
        columns = int((self._width - 16) / _LETTER)
        self._lines_below = [
            (line, kind)
            for kind, lines in (("", conclusions(trace)), ("quiet", remarks(trace)))
            for each in lines
            for line in _wrapped(each, columns)
        ]
        self._bars_end = _TOP + _ROW * len(trace.nodes)
        self._height = self._bars_end + _BOTTOM + _ROW * (len(self._lines_below) - 1)

    def lines(self) -> Iterator[str]:
        size = f'width="{self._width:.0f}" height="{self._height}" viewBox="0 0 {self._width:.0f} {self._height}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>'
        yield '<rect width="100%" height="100%" class="paper"/>'
        yield _text(8, 18, headline(self._trace), "head")
        yield from self._grid()
        yield from self._rows()
        for place, (line, kind) in enumerate(self._lines_below):
            yield _text(8, self._bars_end + _BOTTOM - 12 + place * _ROW, line, kind)
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
        for place, (worker, node, begin, kind, is_failed) in enumerate(rows(self._trace)):
            y = _TOP + place * _ROW
            yield _text(8, y + 12, worker[:14], "quiet")
            failed = "failed" if is_failed else ""
            yield _text(_NAMES + _INDENT * node.depth, y + 12, node.span.name, failed)
            width = max(self._x(node.milliseconds) - self._left, 1.0)
            yield (
                f'<rect class="{kind}" x="{self._x(begin):.1f}" y="{y + 3}" width="{width:.1f}" '
                f'height="{_ROW - 6}" rx="2"><title>{escape(_tooltip(node))}</title></rect>'
            )
            yield _text(self._width - 8, y + 12, duration(node.milliseconds), "quiet", "end")


def _tooltip(node: Node) -> str:
    attributes = [f"{name}: {value}" for name, value in node.span.attributes.items()]
    events = [f"{event.name} {dict(event.attributes) or ''}".rstrip() for event in node.span.events]
    failed = [] if node.span.error is None else [f"failed: {node.span.error}"]
    return "\n".join(
        [f"{node.worker} {node.span.name} {duration(node.milliseconds)}", *failed, *attributes, *events]
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def waterfall(trace: Trace, columns: int) -> Iterator[Text]:
    """The lines of a drawing that is `columns` wide, but at least 80."""
    yield Text(headline(trace), "bold")
    workers = max(len(node.worker) for node in trace.nodes)
    labels = max(len(_label(node)) for node in trace.nodes)
    width = min(max(columns - workers - labels - 14, _LEAST_BAR), _MOST_BAR)
    for worker, node, begin, kind, is_failed in rows(trace):
        line = Text(f"{worker:{workers}} ", "dim")
        line.append(f"{_label(node):{labels}} ", "red" if is_failed else "")
        line.append(_bar(begin, node.milliseconds, trace.milliseconds, width), _STYLES[kind])
        line.append(f" {duration(node.milliseconds):>10}")
        yield line
    for conclusion in conclusions(trace):
        yield from map(Text, _wrapped(conclusion, columns))
    for remark in remarks(trace):
        yield from (Text(line, "dim") for line in _wrapped(remark, columns))


def headline(trace: Trace) -> str:
    name = next(iter(trace.request_ids), trace.trace_id)
    first = trace.first_token_ms
    facts = [
        f"{duration(trace.milliseconds)}",
        *([] if trace.has_ended else ["its end is not written yet"]),
        *([trace.order] if trace.order else []),
        *([f"first token after {duration(first)}"] if first is not None else []),
    ]
    return f"request {name}: {', '.join(facts)}"


def conclusions(trace: Trace) -> Iterator[str]:
    """The spans with most of the time, and the longest gap between tokens, which no span shows."""
    total = trace.milliseconds or 1.0
    most = [
        f"{node.worker} {node.span.name} {duration(ms)} ({ms / total:.0%})"
        for node, ms in trace.blame[:_MOST_BLAMED]
    ]
    yield f"most of it: {', '.join(most)}"
    gap = trace.longest_gap
    if gap is not None and gap.milliseconds >= max(_LEAST_GAP_SHARE * total, _LEAST_GAP_MS):
        yield f"no token for {duration(gap.milliseconds)} at {gap.worker}, after its first {gap.after_tokens}"


def _wrapped(text: str, columns: int) -> list[str]:
    """Wrapped between words; a terminal would break within a word."""
    return textwrap.wrap(text, max(columns, _LEAST_BAR), break_on_hyphens=False)


def remarks(trace: Trace) -> Iterator[str]:
    """Lines for failures, KV transfers, fallback steps, and a client that disconnected."""
    errors: list[str | None] = []
    for node in trace.nodes:
        del errors[node.depth :]
        # An error is shown once, though it passes through all spans around the one where it happened.
        is_shown = node.span.error in errors[-1:]
        errors.append(node.span.error)
        for note in _notes(node, is_error_shown=is_shown):
            yield f"{node.worker} {node.span.name}: {note}"


def _notes(node: Node, *, is_error_shown: bool) -> Iterator[str]:
    attributes: Mapping[str, object] = node.span.attributes
    if node.span.error is not None and not is_error_shown:
        yield f"failed: {node.span.error}"
    yield from _transfer(attributes)
    if "because" in attributes:
        yield f"to {attributes.get('to')}, because {attributes['because']}"
    for event in node.span.events:
        if event.name != "first_token":
            said = ", ".join(f"{name} {_words(value)}" for name, value in event.attributes.items())
            yield f"{event.name} {said}".rstrip()


def _transfer(attributes: Mapping[str, object]) -> Iterator[str]:
    try:
        num_bytes, rate = (
            float(str(attributes[f"kv_transfer.{name}"])) for name in ("bytes", "gb_per_second")
        )
    except (KeyError, ValueError):  # none, or not as this version writes them
        return
    route = (("by", attributes.get("kv_transfer.transport")), ("from", attributes.get("kv_transfer.link")))
    by_from = "".join(f" {word} {value}" for word, value in route if value)
    yield f"{num_bytes / 1024:,.0f} KiB{by_from}, {rate:.3g} GB/s"


def _words(value: Value) -> str:
    return " ".join(value) if isinstance(value, list | tuple) else str(value)


def _label(node: Node) -> str:
    return "  " * node.depth + node.span.name


def _bar(begin: float, milliseconds: float, total: float, width: int) -> str:
    at = min(round(begin / total * width), width - 1) if total else 0
    end = min(max(round((begin + milliseconds) / total * width), at + 1), width) if total else 1
    is_short = milliseconds < total / width / 2
    return f"{' ' * at + ('▏' if is_short else '█') * (end - at):{width}}"


def duration(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 10_000 else f"{milliseconds / 1000:.1f} s"
