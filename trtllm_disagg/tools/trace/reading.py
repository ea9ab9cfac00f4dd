"""Reads traces: the spans of one request over all its processes, as a tree, and which span took its time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.run_dir import halves
from trtllm_disagg.tracing.spans import SpanData, Value
from trtllm_disagg.tracing.trace_file import (
    LONGEST_GAP,
    LONGEST_GAP_AFTER,
    OLD_SUFFIX,
    SCOPE,
    TRACES_DIR,
    ReadSpan,
    read_spans,
)

_FRONTEND, _FRONTEND_LOG = "frontend", "frontend.log"
_REQUEST_ID = "gen_ai.request.id"
#: A gap that a worker relays is at least this share of the original gap.
_SAME_GAP = 0.8
#: Prefixes that the frontend puts before the id in its answers.
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp-")

_TIME = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")
# The first request id of a line is the one that workers know.
_ASKED_ID = re.compile(rb'(?<![\w-])request_id"?[=:]"?([^\s",}]+)')
_ELAPSED = re.compile(rb'elapsed_ms"?[=:]"?(\d{1,15})\b')
#: Spans that last until the client has the whole answer; a request has one of them in every order.
_TO_THE_END = ("http-request", "request", "decode_stage")
_CHOSEN, _COMPLETED = b"Selected worker", b"request completed"


class Stay(NamedTuple):
    """A request at the frontend; nanoseconds since the epoch. `chosen`: when the router had chosen a worker."""

    start: int
    chosen: int | None
    end: int


def read_stays(log: Path) -> Mapping[str, Stay]:
    """Request id -> stay of a request that has ended, to the millisecond; empty where there is no such log."""
    chosen: dict[str, int] = {}
    stays: dict[str, Stay] = {}
    for half in halves(log):
        with half.open("rb") as lines:
            for line in lines:
                if _CHOSEN in line or _COMPLETED in line:
                    _note_line(line, chosen, stays)
    return stays


def _note_line(line: bytes, chosen: dict[str, int], stays: dict[str, Stay]) -> None:
    at, asked, elapsed = (each.search(line) for each in (_TIME, _ASKED_ID, _ELAPSED))
    if at is None or asked is None:
        return
    try:
        moment = round(datetime.fromisoformat(at[0].decode()).timestamp() * 1e6) * 1000
    except ValueError:  # no time, though it looks like one
        return
    request_id = asked[1].decode(errors="replace")
    if _CHOSEN in line:
        chosen.setdefault(request_id, moment)
    elif elapsed is not None:
        start, choice = moment - int(elapsed[1]) * 1_000_000, chosen.get(request_id)
        # `elapsed_ms` is rounded down.
        stays[request_id] = Stay(start if choice is None else min(start, choice), choice, moment)


@dataclass(slots=True)
class Node:
    """A span in its tree; `depth` 0 is a root."""

    span: SpanData
    #: The process that it ran in.
    worker: str
    is_ours: bool
    depth: int = 0
    children: list[Node] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return (self.span.end - self.span.start) / 1e6


class Gap(NamedTuple):
    """The time in which `worker` sent no token, after it had sent `after_tokens`."""

    worker: str
    milliseconds: float
    after_tokens: int


@dataclass(frozen=True)
class Trace:
    trace_id: str
    #: In the order of their start. More than one where a process between them has exported no spans.
    roots: Sequence[Node]

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """All spans, parents before their children, siblings in the order of their start."""
        nodes: list[Node] = []
        waiting = [*reversed(self.roots)]
        while waiting:
            nodes.append(waiting.pop())
            waiting += reversed(nodes[-1].children)
        return nodes

    @cached_property
    def start(self) -> int:
        return min(node.span.start for node in self.nodes)

    @cached_property
    def end(self) -> int:
        return max(node.span.end for node in self.nodes)

    @property
    def milliseconds(self) -> float:
        return (self.end - self.start) / 1e6

    @property
    def has_ended(self) -> bool:
        """Spans are written when they end. A request with only the spans of a prefill still runs, or was lost."""
        return any(node.span.name in _TO_THE_END for node in self.nodes)

    @property
    def first_token_ms(self) -> float | None:
        """From the start of the trace until a worker sent the first token to the frontend. Under `router` the frontend
        keeps the one of the prefill worker, and the client gets it with those of the decode worker.
        """
        asked = [node for node in self.nodes if node.span.name == "request"] or self.nodes
        least = min(node.depth for node in asked)
        firsts = [
            event.at
            for node in asked
            if node.depth == least
            for event in node.span.events
            if event.name == "first_token"
        ]
        if not firsts:
            return None
        return ((max if self.order == "router" else min)(firsts) - self.start) / 1e6

    @property
    def request_ids(self) -> list[str]:
        return list(dict.fromkeys(str(each) for each in self._values_of(_REQUEST_ID)))

    @property
    def order(self) -> str:
        """The strategy that ran, as reported by the worker that answered the client."""
        return str(next(self._values_of(f"{SCOPE}.strategy"), ""))

    def _values_of(self, name: str) -> Iterator[Value]:
        return (node.span.attributes[name] for node in self.nodes if name in node.span.attributes)

    @cached_property
    def blame(self) -> list[tuple[Node, float]]:
        """How many milliseconds of the request belong to each span, the most first. Each moment belongs to the deepest
        span that ran then, because a span waits for the spans inside it.
        """
        moments = sorted({at for node in self.nodes for at in (node.span.start, node.span.end)})
        taken: dict[int, float] = defaultdict(float)
        for begin, end in pairwise(moments):
            running = [
                (node.depth, node.span.start, place)
                for place, node in enumerate(self.nodes)
                if node.span.start <= begin and node.span.end >= end
            ]
            if running:
                taken[max(running)[2]] += (end - begin) / 1e6
        return sorted(((self.nodes[place], ms) for place, ms in taken.items()), key=lambda each: -each[1])

    @cached_property
    def longest_gap(self) -> Gap | None:
        """The longest gap between two tokens. Gaps in relayed tokens count at the worker that generated the tokens."""
        gaps = [gap for node in self.nodes if (gap := _gap(node)) is not None]
        longest = max((gap.milliseconds for gap in gaps), default=0.0)
        # Parents come before the spans that they call.
        return next((gap for gap in reversed(gaps) if gap.milliseconds >= _SAME_GAP * longest), None)


def _gap(node: Node) -> Gap | None:
    attributes = node.span.attributes
    try:
        seconds, after = (float(str(attributes[name])) for name in (LONGEST_GAP, LONGEST_GAP_AFTER))
        return Gap(node.worker, seconds * 1000, int(after))
    except (KeyError, ValueError, OverflowError):  # not as this version writes them
        return None


def read_traces(path: Path) -> list[Trace]:
    """The traces in a run directory or a file of OTLP/JSON that have a span of this package, in the order of their
    start. Raises ConfigError when `path` is neither.
    """
    traces = [trace for trace in _traces(_read(path)) if any(node.is_ours for node in trace.nodes)]
    stays = read_stays(path / _FRONTEND_LOG)
    with_stays = [(trace, next(filter(None, map(stays.get, trace.request_ids)), None)) for trace in traces]
    return [trace if stay is None else _below(stay, trace) for trace, stay in with_stays]


def _below(stay: Stay, trace: Trace) -> Trace:
    """The trace below spans of the frontend: its time before the first worker began and after the last one ended."""

    def of_frontend(name: str, start: int, end: int, children: Sequence[Node] = ()) -> Node:
        span = SpanData(name, trace.trace_id, "", None, start, end)
        return Node(span, _FRONTEND, False, children=list(children))

    began, parts = trace.start, list(trace.roots)
    if stay.chosen is not None and stay.chosen <= began:
        parts[:0] = (
            of_frontend("select", stay.start, stay.chosen),
            of_frontend("dispatch", stay.chosen, began),
        )
    root = of_frontend("http-request", min(stay.start, began), max(stay.end, trace.end), parts)
    _set_depths([root])
    return Trace(trace.trace_id, [root])


def _read(path: Path) -> Iterator[Node]:
    if path.is_file():
        for read in read_spans(path):
            yield _node(read, _name(read.resource))
        return
    directory = path / TRACES_DIR
    if not directory.is_dir():
        raise ConfigError.bad_value(
            "--run-dir", str(path), f"a run directory of `trtllm-disagg up`, with {TRACES_DIR}/"
        )
    # The older files first.
    for file in sorted(directory.glob(f"*.jsonl{OLD_SUFFIX}")) + sorted(directory.glob("*.jsonl")):
        for read in read_spans(file):
            yield _node(read, file.name.partition(".")[0])


def _node(read: ReadSpan, worker: str) -> Node:
    return Node(read.data, worker, read.scope == SCOPE)


def _name(resource: dict[str, Value]) -> str:
    worker, instance = resource.get("trtllm_disagg.worker"), str(resource.get("service.instance.id", ""))
    if worker is None:
        return str(resource.get("service.name", ""))
    return f"{str(worker).partition('/')[0]}-{instance[-4:]}"


def _traces(nodes: Iterator[Node]) -> list[Trace]:
    by_trace: dict[str, dict[str, Node]] = defaultdict(dict)
    for node in nodes:
        by_trace[node.span.trace_id][node.span.span_id] = node
    traces = [Trace(trace_id, _tree(spans)) for trace_id, spans in by_trace.items()]
    return sorted(traces, key=lambda trace: trace.start)


def _tree(spans: dict[str, Node]) -> list[Node]:
    roots: list[Node] = []
    for node in sorted(spans.values(), key=lambda each: (each.span.start, -each.span.end)):
        parent = _parent(node, spans)
        (roots if parent is None else parent.children).append(node)
    _set_depths(roots)
    return roots


def _parent(node: Node, spans: Mapping[str, Node]) -> Node | None:
    """None for a root, and for a span that is above itself, which otherwise would be below no root."""
    parent = above = spans.get(node.span.parent_id or "")
    passed: set[str] = set()
    while above is not None and above.span.span_id not in passed:
        if above is node:
            return None
        passed.add(above.span.span_id)
        above = spans.get(above.span.parent_id or "")
    return parent


def _set_depths(roots: Sequence[Node]) -> None:
    waiting = [(root, 0) for root in roots]
    while waiting:
        node, depth = waiting.pop()
        node.depth = depth
        waiting += [(child, depth + 1) for child in node.children]


def find_trace(traces: Sequence[Trace], request_id: str) -> Trace:
    """The trace with a request id, as the client or a log shows it, or a trace id. Raises ConfigError without one."""
    wanted = request_id
    for prefix in _ID_PREFIXES:
        wanted = wanted.removeprefix(prefix)
    for trace in reversed(traces):
        if wanted == trace.trace_id or wanted in trace.request_ids:
            return trace
    last = ", ".join(each for trace in traces[-3:] for each in trace.request_ids[:1])
    known = (
        f"one of {len(traces)} requests that were traced there, the last ones {last}"
        if traces
        else "none is there"
    )
    raise ConfigError.bad_value("REQUEST_ID", request_id, known)
