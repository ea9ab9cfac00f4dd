"""Draws traces, one row with a bar per span: in a terminal, as a page, or as a picture."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from io import StringIO
from itertools import zip_longest

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

from trtllm_disagg.tools.trace.reading import MIGRATED, Node, Trace
from trtllm_disagg.tracing.spans import Value

_LEAST_BAR, _MAX_BAR = 10, 80
_MAX_BLAMED = 3
#: Min length of a gap to show, and its min share of the request.
_LEAST_GAP_MS, _LEAST_GAP_SHARE = 50.0, 0.05
#: Width of pages and pictures.
_COLUMNS = 140
_PAGE = """<!doctype html><meta charset="utf-8"><title>trace</title>
<style>body {font: 14px monospace} div {white-space: pre} div:hover {background: #eee}</style>
"""


def page(traces: Sequence[Trace]) -> str:
    """An HTML page with all traces on one scale. Hovering over a row shows its span's details."""
    scale_ms, parts = max(trace.milliseconds for trace in traces), [_PAGE]
    for trace in traces:
        above = len(_wrapped(headline(trace), _COLUMNS))
        titles = [""] * above + [_title(node, trace) for node in trace.nodes]
        for line, title in zip_longest(waterfall(trace, _COLUMNS, scale_ms), titles, fillvalue=""):
            console = Console(record=True, width=_COLUMNS, file=StringIO(), highlight=False)
            console.print(line)
            row = console.export_html(inline_styles=True, code_format="{code}").rstrip("\n")
            parts.append(f'<div title="{escape(title)}">{row}</div>\n')
        parts.append("<br>\n")
    return "".join(parts)


def _title(node: Node, trace: Trace) -> str:
    at = (node.span.start - trace.start) / 1e6
    facts = [f"{node.worker} {node.span.name}: {duration(node.milliseconds)} from {duration(at)}"]
    facts += [f"{name}: {_words(value)}" for name, value in node.span.attributes.items()]
    facts += [f"{each.name} at {duration((each.at - trace.start) / 1e6)}" for each in node.span.events]
    return "\n".join([*facts, *([f"failed: {node.span.error}"] if node.span.error else [])])


def picture(trace: Trace) -> str:
    """One SVG in the reader's light or dark colours. Leaves out rich's fonts, which a browser would load."""
    console = Console(record=True, width=_COLUMNS, file=StringIO())
    draw([trace], console)
    themes = DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
    light, dark = (console.export_svg(title="", theme=theme, clear=False) for theme in themes)
    colours = "".join(re.findall(r"\.[\w-]+-r\d+ \{.*\}", dark))
    paper = f"rect[rx] {{ fill: {SVG_EXPORT_THEME.background_color.hex} }}"
    in_the_dark = f"@media (prefers-color-scheme: dark) {{ {paper} {colours} }}"
    return re.sub(r"@font-face\s*\{[^}]*\}", "", light).replace("</style>", f"{in_the_dark}\n    </style>", 1)


def draw(traces: Sequence[Trace], console: Console) -> None:
    """Prints the traces, separated by empty lines."""
    for number, trace in enumerate(traces):
        console.print(*[""] * bool(number), *waterfall(trace, console.width), sep="\n")


def waterfall(trace: Trace, columns: int, scale_ms: float | None = None) -> Iterator[Text]:
    """The lines of a drawing of `columns` (at least 80). Bars cover `scale_ms` (default: the request's own time)."""
    yield from (Text(line, "bold") for line in _wrapped(headline(trace), columns))
    workers = max(len(node.worker) for node in trace.nodes)
    labels = max(len(_label(node)) for node in trace.nodes)
    width = min(max(columns - workers - labels - 14, _LEAST_BAR), _MAX_BAR)
    marked, above = _marked(trace), ""
    for node in trace.nodes:
        line = Text(f"{'' if node.worker == above else node.worker:{workers}} ", "dim")
        line.append(f"{_label(node):{labels}} ", "red" if node.span.error is not None else "")
        begin = (node.span.start - trace.start) / 1e6
        bar = _bar(begin, node.milliseconds, scale_ms or trace.milliseconds, width)
        line.append(bar, "bold yellow" if node is marked else "cyan" if node.is_ours else "dim")
        line.append(f" {duration(node.milliseconds):>10}")
        yield line
        above = node.worker
    for conclusion in conclusions(trace):
        yield from map(Text, _wrapped(conclusion, columns))
    for remark in remarks(trace):
        yield from (Text(line, "dim") for line in _wrapped(remark, columns))


def _marked(trace: Trace) -> Node | None:
    """The span with most of the time. If a worker stalled for half of it, its shortest span around the stall."""
    gap = trace.longest_gap
    if gap is not None and 2 * gap.milliseconds > trace.milliseconds:
        around = [
            each
            for each in trace.nodes
            if each.worker == gap.worker and each.milliseconds >= gap.milliseconds
        ]
        if around:
            return min(around, key=lambda node: node.milliseconds)
    return trace.blame[0][0] if trace.blame else None


def headline(trace: Trace) -> str:
    name = next(iter(trace.request_ids), trace.trace_id)
    first = trace.first_token_ms
    facts = [
        f"{duration(trace.milliseconds)}",
        *([] if trace.has_ended else ["not ended yet"]),
        *([trace.order] if trace.order else []),
        *([f"first token after {duration(first)}"] if first is not None else []),
        *(
            f"taken over after {each.attributes['after_tokens']:,} tokens, at {duration((each.at - trace.start) / 1e6)}"
            for each in trace.takeovers
        ),
        *([f"failed: {trace.error}"] if trace.error is not None else []),
    ]
    return f"request {name}: {', '.join(facts)}"


def conclusions(trace: Trace) -> Iterator[str]:
    """The spans with most of the time, and the longest gap between tokens, which no span shows."""
    total = trace.milliseconds or 1.0
    longest = [
        f"{node.worker} {node.span.name} {duration(ms)} ({ms / total:.0%})"
        for node, ms in trace.blame[:_MAX_BLAMED]
    ]
    yield f"most of it: {', '.join(longest)}"
    gap = trace.longest_gap
    if gap is not None and gap.milliseconds >= max(_LEAST_GAP_SHARE * total, _LEAST_GAP_MS):
        yield f"no token for {duration(gap.milliseconds)} at {gap.worker}, after its first {gap.after_tokens}"


def _wrapped(text: str, columns: int) -> list[str]:
    """Wrapped between words, where a terminal would break them."""
    return textwrap.wrap(text, max(columns, _LEAST_BAR), break_on_hyphens=False)


def remarks(trace: Trace) -> Iterator[str]:
    """Lines about failures, KV transfers, fallbacks and disconnected clients."""
    errors: list[str | None] = []
    for node in trace.nodes:
        del errors[node.depth :]
        # Show an error once, although it passes through all enclosing spans.
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
        if event.name not in ("first_token", MIGRATED):
            said = ", ".join(f"{name} {_words(value)}" for name, value in event.attributes.items())
            yield f"{event.name} {said}".rstrip()


def _transfer(attributes: Mapping[str, object]) -> Iterator[str]:
    try:
        num_bytes, rate = (
            float(str(attributes[f"kv_transfer.{name}"])) for name in ("bytes", "gb_per_second")
        )
    except (KeyError, ValueError):  # none, or written by another version
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
