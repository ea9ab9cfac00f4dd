"""Reads traces: a tree of one request's spans over all processes, and the span that took its time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.trace.otlp_file import read_spans
from trtllm_disagg.tools.up.run_dir import halves
from trtllm_disagg.tracing.spans import SpanData, SpanEvent, Value
from trtllm_disagg.tracing.trace_file import (
    LONGEST_GAP,
    LONGEST_GAP_AFTER,
    OLD_SUFFIX,
    SCOPE,
    TRACES_DIR,
)

_FRONTEND, _FRONTEND_LOG, MIGRATED = "frontend", "frontend.log", "taken_over"
_REQUEST_ID = "gen_ai.request.id"
#: A relayed gap is at least this share of the original one.
_SAME_GAP = 0.8
#: The frontend adds these prefixes to the id in its answers.
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp-")

_TIME = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")
# The first request id of a line is the workers' one.
_ASKED_ID = re.compile(rb'(?<![\w-])request_id"?[=:]"?([^\s",}]+)')
_NUMBERS = re.compile(
    rb'\b(elapsed_ms|ttft_ms|output_tokens|migration\.tokens_completed)"?[=:]"?(\d{1,15}(?:\.\d{1,9})?)\b'
)
_ERROR = re.compile(rb'\bstatus"?[=:]"?error\b.*?error_detail"?[=:]"?(.*?)"?(?:,"| elapsed_ms|$)')
_REASON = re.compile(rb'migration\.reason"?[=:]"?([^\s",}]+)')
#: Spans that last until the client has the whole answer; each order has one of them.
_TO_THE_END = ("http-request", "request", "decode_stage")
_CHOSEN, _MOVED, _COMPLETED = b"Selected worker", b"migration retry scheduled", b"request completed"


class Stay(NamedTuple):
    """A request at the frontend; nanoseconds since the epoch. `chosen`: when the router had chosen a worker."""

    start: int
    chosen: int | None
    end: int
    #: First token at the client, and takeovers from lost workers.
    events: tuple[SpanEvent, ...] = ()
    #: The error that the client got; None: answer complete, or client gone.
    error: str | None = None


def read_stays(log: Path) -> Mapping[str, Stay]:
    """Request id -> its stay, for requests that ended, to the millisecond; empty without such a log."""
    noted = _Noted()
    for half in halves(log):
        with half.open("rb") as lines:
            for line in lines:
                if _CHOSEN in line or _MOVED in line or _COMPLETED in line:
                    noted.add(line)
    return noted.stays


class _Noted:
    """The facts in the lines of a frontend's log."""

    def __init__(self) -> None:
        self.stays: dict[str, Stay] = {}
        self._chosen: dict[str, int] = {}
        #: By the frontend's own request id, which is the second id in the line of its end.
        self._moves: dict[str, list[SpanEvent]] = defaultdict(list)

    def add(self, line: bytes) -> None:
        at, ids = _TIME.search(line), [each.decode(errors="replace") for each in _ASKED_ID.findall(line)]
        if at is None or not ids:
            return
        try:
            moment = round(datetime.fromisoformat(at[0].decode()).timestamp() * 1e6) * 1000
        except ValueError:  # an invalid time
            return
        numbers = {name.decode(): float(value) for name, value in _NUMBERS.findall(line)}
        if _CHOSEN in line:
            self._chosen.setdefault(ids[0], moment)
        elif _MOVED in line:
            reason = _REASON.search(line)
            tokens = int(numbers.get("migration.tokens_completed", 0))
            facts = {"after_tokens": tokens, "because": reason[1].decode(errors="replace") if reason else ""}
            self._moves[ids[0]].append(SpanEvent(MIGRATED, moment, facts))
        elif "elapsed_ms" in numbers:
            start, choice = moment - int(numbers["elapsed_ms"] * 1e6), self._chosen.get(ids[0])
            # `elapsed_ms` is rounded down.
            start = start if choice is None else min(start, choice)
            waited = numbers.get("ttft_ms")
            first = [] if waited is None else [SpanEvent("first_token", start + int(waited * 1e6), {})]
            # The last takeover is the answer's end if no token followed.
            moves = {
                each.attributes["after_tokens"]: each for own in ids[1:] for each in self._moves.pop(own, ())
            }
            moves.pop(int(numbers.get("output_tokens", -1)), None)
            error = _ERROR.search(line)
            client_error = error[1].decode(errors="replace") if error else None
            self.stays[ids[0]] = Stay(start, choice, moment, (*first, *moves.values()), client_error)


@dataclass(slots=True)
class Node:
    """A span in its tree; roots have `depth` 0."""

    span: SpanData
    #: The span's process.
    worker: str
    is_ours: bool
    depth: int = 0
    children: list[Node] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return (self.span.end - self.span.start) / 1e6


class Gap(NamedTuple):
    """A time in which `worker` sent no token, after `after_tokens` tokens."""

    worker: str
    milliseconds: float
    after_tokens: int


@dataclass(frozen=True)
class Trace:
    trace_id: str
    #: By start. Several if a process between them exported no spans.
    roots: Sequence[Node]

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """All spans, parents first, siblings by start."""
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
        """Spans are written when they end: a request with only prefill spans is running or lost."""
        return any(node.span.name in _TO_THE_END for node in self.nodes)

    @property
    def first_token_ms(self) -> float | None:
        """Time from the start until the frontend had the first token. Under `router`, the frontend holds the prefill
        worker's token back, and the client gets it with those of decode.
        """
        # The frontend's own time comes first: a lost worker leaves none.
        at_frontend = [root for root in self.roots if root.worker == _FRONTEND and root.span.events]
        asked = at_frontend or [node for node in self.nodes if node.span.name == "request"] or self.nodes
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
    def error(self) -> str | None:
        """The error that the client got from the frontend, or the frontend from its worker."""
        return next((root.span.error for root in self.roots if root.span.error), None)

    @property
    def takeovers(self) -> list[SpanEvent]:
        """Takeovers by other workers, with the number of tokens that the client had."""
        return [each for root in self.roots for each in root.span.events if each.name == MIGRATED]

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
        """Milliseconds of each span, the most first. Each moment belongs to the deepest running span, since a span
        waits for the spans inside it.
        """
        moments = sorted({at for node in self.nodes for at in (node.span.start, node.span.end)})
        shares: dict[int, float] = defaultdict(float)
        for begin, end in pairwise(moments):
            running = [
                (node.depth, node.span.start, place)
                for place, node in enumerate(self.nodes)
                if node.span.start <= begin and node.span.end >= end
            ]
            if running:
                shares[max(running)[2]] += (end - begin) / 1e6
        return sorted(((self.nodes[place], ms) for place, ms in shares.items()), key=lambda each: -each[1])

    @cached_property
    def longest_gap(self) -> Gap | None:
        """The longest gap between two tokens, at the worker that generated them; relays repeat it."""
        gaps = [gap for node in self.nodes if (gap := _gap(node)) is not None]
        longest = max((gap.milliseconds for gap in gaps), default=0.0)
        # Parents come before the spans that they call.
        return next((gap for gap in reversed(gaps) if gap.milliseconds >= _SAME_GAP * longest), None)


def _gap(node: Node) -> Gap | None:
    attributes = node.span.attributes
    try:
        seconds, after = (float(str(attributes[name])) for name in (LONGEST_GAP, LONGEST_GAP_AFTER))
        return Gap(node.worker, seconds * 1000, int(after))
    except (KeyError, ValueError, OverflowError):  # written by another version
        return None


def read_traces(path: Path) -> list[Trace]:
    """The traces with a span of this package, in a run directory or OTLP/JSON file, by start. Raises ConfigError if
    `path` is neither.
    """
    traces = [trace for trace in _traces(_read(path)) if any(node.is_ours for node in trace.nodes)]
    stays = read_stays(path / _FRONTEND_LOG)
    with_stays = [(trace, next(filter(None, map(stays.get, trace.request_ids)), None)) for trace in traces]
    return [trace if stay is None else _below(stay, trace) for trace, stay in with_stays]


def _below(stay: Stay, trace: Trace) -> Trace:
    """Puts the trace below the frontend's spans, which show the time before and after the workers' part."""

    def of_frontend(name: str, start: int, end: int, children: Sequence[Node] = (), **more: Any) -> Node:
        span = SpanData(name, trace.trace_id, "", None, start, end, **more)
        return Node(span, _FRONTEND, False, children=list(children))

    began, parts = trace.start, list(trace.roots)
    if stay.chosen is not None and stay.chosen <= began:
        parts[:0] = (
            of_frontend("select", stay.start, stay.chosen),
            of_frontend("dispatch", stay.chosen, began),
        )
    begin, end = min(stay.start, began), max(stay.end, trace.end)
    root = of_frontend("http-request", begin, end, parts, events=[*stay.events], error=stay.error)
    _set_depths([root])
    return Trace(trace.trace_id, [root])


def _read(path: Path) -> Iterator[Node]:
    if path.is_file():
        for read in read_spans(path):
            yield Node(read.data, _name(read.resource), read.scope == SCOPE)
        return
    directory = path / TRACES_DIR
    if not directory.is_dir():
        raise ConfigError.bad_value(
            "--run-dir", str(path), f"a run directory of `trtllm-disagg up`, with {TRACES_DIR}/"
        )
    # Older files first.
    for file in sorted(directory.glob(f"*.jsonl{OLD_SUFFIX}")) + sorted(directory.glob("*.jsonl")):
        for read in read_spans(file):
            yield Node(read.data, file.name.partition(".")[0], read.scope == SCOPE)


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
    """The parent; None for a root, and for a span in a cycle, which no root would reach."""
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
    """Finds a trace by request id, as in answers and logs, or by trace id. Raises ConfigError."""
    wanted = request_id
    for prefix in _ID_PREFIXES:
        wanted = wanted.removeprefix(prefix)
    for trace in reversed(traces):
        if wanted == trace.trace_id or wanted in trace.request_ids:
            return trace
    last = ", ".join(each for trace in traces[-3:] for each in trace.request_ids[:1])
    known = f"one of the {len(traces)} traced requests; the last ones are {last}"
    raise ConfigError.bad_value("REQUEST_ID", request_id, known if traces else "no request has been traced")
