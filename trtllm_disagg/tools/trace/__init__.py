"""`trtllm-disagg trace`: shows where a request's time went, from a run directory or a file of OTLP/JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.flag_types import positive
from trtllm_disagg.tools.trace.reading import Node, Trace, find_trace, read_traces

if TYPE_CHECKING:
    from trtllm_disagg.common.cli import Parser


def add_arguments(parser: Parser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of `up`, running or not")
    where.add_argument("--otlp-file", type=Path, metavar="FILE", help="OTLP/JSON lines from a collector")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "request_id", nargs="?", metavar="REQUEST_ID", help="request id, as in answers and logs, or trace id"
    )
    what.add_argument(
        "--last", type=positive, metavar="N", help="the last N requests (default: the last one)"
    )
    what.add_argument("--slowest", type=positive, metavar="N", help="the N slowest requests")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page, or a picture if FILE ends in .svg"
    )
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write a file for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> ExitCode:
    """Raises ConfigError when the request has no trace."""
    from trtllm_disagg.common.console import Console
    from trtllm_disagg.tools.trace.waterfall import draw, page, picture

    source = args.run_dir or args.otlp_file
    if args.otlp_file is not None and not source.is_file():
        raise ConfigError.bad_value("--otlp-file", str(source), "a file of OTLP/JSON")
    if sum((args.html is not None, args.perfetto is not None, args.json)) > 1:
        raise ConfigError("give only one of --html, --perfetto and --json")
    chosen = _chosen(read_traces(source), args, source)
    if args.html is not None:
        is_picture = args.html.suffix == ".svg"
        if is_picture and len(chosen) > 1:
            raise ConfigError.bad_value("--html", str(args.html), "a name in .html for more than one request")
        _write("--html", args.html, picture(chosen[0]) if is_picture else page(chosen))
    elif args.perfetto is not None:
        _write("--perfetto", args.perfetto, chrome_trace(chosen))
    elif args.json:
        print(json.dumps([as_json(trace) for trace in chosen], indent=1))
    else:
        draw(chosen, Console(soft_wrap=True))
    return ExitCode.DONE


def _write(flag: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError.bad_value(flag, str(file), f"a writable file ({error.strerror})") from None


def _chosen(traces: list[Trace], args: argparse.Namespace, source: Path) -> list[Trace]:
    if args.request_id is not None:
        return [find_trace(traces, args.request_id)]
    if not traces:
        raise ConfigError(f"{source}: no request has been traced yet")
    # A prefill's spans are written before the request ends, and would look complete.
    traces = [trace for trace in traces if trace.has_ended] or traces
    if args.slowest is not None:
        return sorted(traces, key=lambda trace: -trace.milliseconds)[: args.slowest]
    return traces[-(args.last or 1) :]


def as_json(trace: Trace) -> dict[str, Any]:
    """Times in milliseconds. `longest`: spans by their own time (`reading.Trace.blame`)."""
    return {
        "trace_id": trace.trace_id,
        "request_ids": trace.request_ids,
        "order": trace.order,
        "start": trace.start / 1e9,
        "ms": trace.milliseconds,
        "first_token_ms": trace.first_token_ms,
        "taken_over": [
            each.attributes | {"at_ms": (each.at - trace.start) / 1e6} for each in trace.takeovers
        ],
        "error": trace.error,
        "longest_gap": trace.longest_gap and trace.longest_gap._asdict(),
        "longest": [{"worker": node.worker, "span": node.span.name, "ms": ms} for node, ms in trace.blame],
        "spans": [
            {
                "worker": node.worker,
                "span": node.span.name,
                "depth": node.depth,
                "start_ms": (node.span.start - trace.start) / 1e6,
                "ms": node.milliseconds,
                "error": node.span.error,
                "attributes": node.span.attributes,
                "events": [
                    {"name": each.name, "at_ms": (each.at - trace.start) / 1e6, "attributes": each.attributes}
                    for each in node.span.events
                ],
            }
            for node in trace.nodes
        ],
    }


def chrome_trace(traces: Sequence[Trace]) -> str:
    """JSON in the Chrome trace format for ui.perfetto.dev and chrome://tracing: a process per worker, and threads with
    spans that nest or follow each other.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
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


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _thread(node: Node, threads: list[list[Node]]) -> int:
    """Number of the first thread where `node` overlaps only spans that contain it."""
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


def _events(node: Node, pid: int, tid: int, request: str) -> Iterator[dict[str, Any]]:
    """Times in microseconds, as the format requires."""
    place = {"pid": pid, "tid": tid, "cat": "trtllm_disagg" if node.is_ours else "dynamo"}
    arguments: dict[str, Any] = {"request": request, **node.span.attributes}
    if node.span.error is not None:
        arguments["error"] = node.span.error
    length = {"ts": node.span.start / 1000, "dur": (node.span.end - node.span.start) / 1000}
    yield {"ph": "X", "name": node.span.name, **place, **length, "args": arguments}
    for event in node.span.events:
        details = {"ts": event.at / 1000, "args": dict(event.attributes)}
        yield {"ph": "i", "s": "t", "name": event.name, **place, **details}
