"""Traced workers in this process, and a collector for real workers' exports."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from trtllm_disagg.tools.trace.reading import Node, Trace, read_traces
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tracing.spans import SpanData, TraceParent, Value
from trtllm_disagg.tracing.trace_file import MAX_BYTES, TraceFile
from trtllm_disagg.tracing.tracer import Sampler, Tracer

DYNAMO = {"service.name": "dynamo"}


def every_request(trace_id: str, parent: TraceParent | None) -> bool:
    return True


class Batches:
    """A receiver that keeps all batches."""

    def __init__(self) -> None:
        self.batches: list[list[SpanData]] = []
        self.is_closed = False

    @property
    def spans(self) -> list[SpanData]:
        return [span for batch in self.batches for span in batch]

    def named(self, name: str) -> SpanData:
        (span,) = (each for each in self.spans if each.name == name)
        return span

    def take(self, spans: Sequence[SpanData]) -> None:
        self.batches.append(list(spans))

    def close(self) -> None:
        self.is_closed = True


def tracer_into(*receivers: Batches | TraceFile, sampler: Sampler = every_request) -> Tracer:
    return Tracer(receivers, sampler)


def write(
    file: Path,
    *batches: Sequence[SpanData],
    resource: Mapping[str, Value] = DYNAMO,
    max_bytes: int = MAX_BYTES,
) -> None:
    traces = TraceFile(file, resource, max_bytes)
    for batch in batches:
        traces.take(batch)
    traces.close()


def names_below(node: Node) -> list[str]:
    return [child.span.name for child in node.children]


class Collector:
    """An OTLP/HTTP endpoint like a collector's, which writes to `file`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    collector.write(body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Keeps the tests' output clean."""

        self.server = ThreadingHTTPServer((LOOPBACK, 0), Handler)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of processes that export each ended span to it at once."""
        return {
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{LOOPBACK}:{self.server.server_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            # Dynamo makes trace contexts only with this.
            "DYN_LOGGING_JSONL": "true",
        }

    def traces(self) -> list[Trace]:
        with self._lock:
            return read_traces(self.file) if self.file.exists() else []

    def write(self, body: bytes) -> None:
        from google.protobuf.json_format import MessageToDict
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        batch = MessageToDict(ExportTraceServiceRequest.FromString(body))
        for of_resource in batch.get("resourceSpans", ()):
            for of_scope in of_resource.get("scopeSpans", ()):
                for span in of_scope["spans"]:
                    # OTLP/JSON has ids in hexadecimal, protobuf's own JSON in base64.
                    for key in ("traceId", "spanId", "parentSpanId"):
                        if key in span:
                            span[key] = base64.b64decode(span[key]).hex()
        with self._lock, self.file.open("a") as file:
            file.write(json.dumps(batch) + "\n")


@contextmanager
def collecting(file: Path) -> Iterator[Collector]:
    collector = Collector(file)
    thread = threading.Thread(target=collector.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()
