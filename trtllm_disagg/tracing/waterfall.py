"""Traces in a terminal: a row for each span, its bar on one scale; and two requests beside each other."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from trtllm_disagg.tracing.reading import Node, Trace

_LEAST_BAR, _MOST_BAR = 10, 80
_MOST_BLAMED = 3
#: A gap between tokens is worth a line when it is so long, and so much of the request.
_LEAST_GAP_MS, _LEAST_GAP_SHARE = 50.0, 0.05
#: A moment of the request belongs to this span, and more of them than to any other one.
_LONGEST, _OURS, _OTHERS = "bold yellow", "cyan", "dim"


def waterfall(trace: Trace, columns: int) -> Iterator[Text]:
    """In lines of so many columns, if there are at least 80."""
    yield Text(headline(trace), "bold")
    workers = max(len(node.worker) for node in trace.nodes)
    labels = max(len(_label(node)) for node in trace.nodes)
    width = min(max(columns - workers - labels - 14, _LEAST_BAR), _MOST_BAR)
    longest = trace.blame[0][0] if trace.blame else None
    shown = ""
    for node in trace.nodes:
        style = _LONGEST if node is longest else _OURS if node.is_ours else _OTHERS
        line = Text(f"{node.worker if node.worker != shown else '':{workers}} ", "dim")
        line.append(f"{_label(node):{labels}} ", "red" if node.span.error is not None else "")
        line.append(_bar(node, trace.start, trace.milliseconds, width), style)
        line.append(f" {duration(node.milliseconds):>10}")
        shown = node.worker
        yield line
    yield from map(Text, conclusions(trace))
    for node in trace.nodes:
        for note in _notes(node):
            yield Text(f"{node.worker} {node.span.name}: {note}", "dim")


def headline(trace: Trace) -> str:
    name = next(iter(trace.request_ids), trace.trace_id)
    first = trace.first_token_ms
    told = [
        f"{duration(trace.milliseconds)}",
        *([trace.order] if trace.order else []),
        *([f"first token after {duration(first)}"] if first is not None else []),
    ]
    return f"request {name}: {', '.join(told)}"


def conclusions(trace: Trace) -> Iterator[str]:
    """The spans that have most of its time; and where its tokens stood still, of which no span tells."""
    total = trace.milliseconds or 1.0
    most = [
        f"{node.worker} {node.span.name} {duration(ms)} ({ms / total:.0%})"
        for node, ms in trace.blame[:_MOST_BLAMED]
    ]
    yield f"most of it: {', '.join(most)}"
    gap = trace.longest_gap
    if gap is not None and gap.milliseconds >= max(_LEAST_GAP_SHARE * total, _LEAST_GAP_MS):
        yield f"no token for {duration(gap.milliseconds)} at {gap.worker}, after its first {gap.after_tokens}"


def _wrapped(text: str, columns: int) -> Iterator[Text]:
    """A terminal would break it within a word."""
    return map(Text, textwrap.wrap(text, columns))


def _notes(node: Node) -> Iterator[str]:
    """What is worth a line of its own: failures, KV that moved, steps down the ladder."""
    told: Mapping[str, object] = node.span.attributes
    if node.span.error is not None:
        yield f"failed: {node.span.error}"
    if "kv_transfer.bytes" in told:
        num_bytes, rate = (float(str(told[f"kv_transfer.{name}"])) for name in ("bytes", "gb_per_second"))
        way = (("by", told.get("kv_transfer.transport")), ("from", told.get("kv_transfer.link")))
        said = "".join(f" {word} {value}" for word, value in way if value)
        yield f"{num_bytes / 1024:,.0f} KiB{said}, {rate:.3g} GB/s"
    if "because" in told:
        yield f"to {told.get('to')}, because {told['because']}"
    for event in node.span.events:
        if event.name != "first_token":
            said = ", ".join(f"{name} {value}" for name, value in event.attributes.items())
            yield f"{event.name} {said}".rstrip()


def _label(node: Node) -> str:
    return "  " * node.depth + node.span.name


def _bar(node: Node, start: int, total: float, width: int) -> str:
    begin = (node.span.start - start) / 1e6
    at = min(round(begin / total * width), width - 1) if total else 0
    end = min(max(round((begin + node.milliseconds) / total * width), at + 1), width) if total else 1
    is_short = node.milliseconds < total / width / 2
    return f"{' ' * at + ('▏' if is_short else '█') * (end - at):{width}}"


def duration(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 10_000 else f"{milliseconds / 1000:.1f} s"


def side_by_side(traces: Sequence[Trace], columns: int) -> Iterator[Text]:
    """Two requests on one scale: the same span of both in one row, and by how much the second one took longer."""
    first, second = traces
    for trace in traces:
        yield Text(headline(trace), "bold")
    rows = matched(first, second)
    labels = max(len(_label(node or other)) for node, other in rows if (node or other) is not None)  # type: ignore[arg-type]
    width = max((columns - labels - 36) // 2, _LEAST_BAR)
    total = max(trace.milliseconds for trace in traces)
    widest = max(rows, key=lambda pair: abs(_difference(pair)) if _is_leaf(pair) else -1.0)
    for pair in rows:
        present = next(node for node in pair if node is not None)
        line = Text(f"{_label(present):{labels}} ")
        style = _LONGEST if pair is widest else _OURS if present.is_ours else _OTHERS
        for trace, node in zip(traces, pair, strict=True):
            bar = " " * width if node is None else _bar(node, trace.start, total, width)
            line.append(bar, style)
            line.append(f" {'' if node is None else duration(node.milliseconds):>10} ")
        line.append(f"{_difference(pair):+9.1f}")
        yield line
    for trace in traces:
        yield from map(Text, conclusions(trace))


_Pair = tuple[Node | None, Node | None]


def matched(first: Trace, second: Trace) -> list[_Pair]:
    """Spans of the same way from the root, in the order of the first one; then those that only the second one has."""
    ways = [dict(_ways(trace)) for trace in (first, second)]
    only_second = [way for way in ways[1] if way not in ways[0]]
    return [(ways[0].get(way), ways[1].get(way)) for way in (*ways[0], *only_second)]


def _ways(trace: Trace) -> Iterator[tuple[tuple[str, ...], Node]]:
    path: list[str] = []
    seen: Counter[tuple[str, ...]] = Counter()
    for node in trace.nodes:
        path[node.depth :] = [node.span.name]
        way = tuple(path)
        seen[way] += 1
        path[-1] = f"{node.span.name} {seen[way]}"
        yield tuple(path), node


def _difference(pair: _Pair) -> float:
    first, second = (0.0 if node is None else node.milliseconds for node in pair)
    return second - first


def _is_leaf(pair: _Pair) -> bool:
    return all(node is None or not node.children for node in pair)
