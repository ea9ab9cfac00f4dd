"""Traces in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from trtllm_disagg.tools.trace.reading import Node, Trace

Event = dict[str, Any]


def chrome_trace(traces: Sequence[Trace]) -> str:
    """JSON. A worker is a process. A thread has spans that nest or follow each other, as the format wants."""
    workers = list(dict.fromkeys(node.worker for trace in traces for node in trace.nodes))
    pids = {worker: number for number, worker in enumerate(workers, 1)}
    events = [_named("process_name", pid, 0, worker) for worker, pid in pids.items()]
    threads: dict[str, list[list[Node]]] = {worker: [] for worker in workers}
    for trace in traces:
        request = next(iter(trace.request_ids), trace.trace_id)
        for node in trace.nodes:
            tid = _thread(node, threads[node.worker])
            events += _events(node, pids[node.worker], tid, request)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, default=str)


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _thread(node: Node, threads: list[list[Node]]) -> int:
    """The number of the first thread whose spans `node` overlaps only where it is inside of them."""
    for number, nodes in enumerate(threads):
        if all(_nests(node, other) for other in nodes):
            nodes.append(node)
            return number
    threads.append([node])
    return len(threads) - 1


def _nests(node: Node, other: Node) -> bool:
    begin, end = max(node.span.start, other.span.start), min(node.span.end, other.span.end)
    inner = min(node.span, other.span, key=lambda span: span.end - span.start)
    return begin >= end or (begin, end) == (inner.start, inner.end)


def _events(node: Node, pid: int, tid: int, request: str) -> Iterator[Event]:
    """Microseconds, as the format has them."""
    place = {"pid": pid, "tid": tid, "cat": "trtllm_disagg" if node.is_ours else "dynamo"}
    arguments: dict[str, Any] = {"request": request, **node.span.attributes}
    if node.span.error is not None:
        arguments["error"] = node.span.error
    length = {"ts": node.span.start / 1000, "dur": (node.span.end - node.span.start) / 1000}
    yield {"ph": "X", "name": node.span.name, **place, **length, "args": arguments}
    for event in node.span.events:
        yield {
            "ph": "i",
            "s": "t",
            "name": event.name,
            **place,
            "ts": event.at / 1000,
            "args": dict(event.attributes),
        }
