"""Spans to a collector, by both protocols; and what is asked for and cannot be had."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.tracing import collecting
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tracing.spans import NO_SPAN
from trtllm_disagg.tracing.tracer import tracer_of

MODULE = "trtllm_disagg.tracing.otlp_export"


def use(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, str]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def test_a_collector_gets_what_was_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra [otel]")
    with collecting(tmp_path / "got.jsonl") as collector:
        environment = use(monkeypatch, **collector.environment, OTEL_SERVICE_NAME="mine")
        tracer = tracer_of(environment, "prefill/prefill_first", "1a2b")
        span = tracer.begin("request", "r", None, None)
        span.child("prefill", {"instance": "1a"}).end()
        span.event("first_token")
        span.end(ValueError("no"))
        tracer.close()
        (trace,) = collector.traces()
    request, prefill = trace.nodes
    assert (request.span.name, request.span.error, request.worker) == (
        "request",
        "ValueError: no",
        "prefill-1a2b",
    )
    assert [event.name for event in request.span.events] == ["first_token"]
    assert (prefill.span.name, prefill.span.attributes) == ("prefill", {"instance": "1a"})
    assert request.is_ours
    assert trace.roots == [request]


def test_a_collector_of_grpc_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    grpc = pytest.importorskip("grpc", reason="the extra [otel]")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[ExportTraceServiceRequest] = []
    has_come = threading.Event()

    def export(body: bytes, context: object) -> bytes:
        got.append(ExportTraceServiceRequest.FromString(body))
        has_come.set()
        return b""

    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = server.add_insecure_port(f"{LOOPBACK}:0")
        server.start()
        environment = use(
            monkeypatch,
            OTEL_EXPORT_ENABLED="1",
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"http://{LOOPBACK}:{port}",
            OTEL_BSP_SCHEDULE_DELAY="10",
        )
        tracer = tracer_of(environment, "agg", "1")
        tracer.begin("request", "r", None, None).end()
        assert has_come.wait(30)
        tracer.close()
        server.stop(None).wait()
    (span,) = got[0].resource_spans[0].scope_spans[0].spans
    assert span.name == "request"


def test_nothing_is_recorded_unless_a_variable_asks_for_it(tmp_path: Path) -> None:
    for variables in ({}, {"OTEL_EXPORT_ENABLED": "false"}, {"OTEL_TRACES_SAMPLER": "always_on"}):
        assert tracer_of(variables, "agg", "1").begin("request", "r", None, None) is NO_SPAN
    to_file = tracer_of({"TRTLLM_DISAGG_TRACE_FILE": str(tmp_path / "a.jsonl")}, "agg", "1")
    assert to_file.begin("request", "r", None, None).is_recording


@pytest.mark.parametrize("absent", ["sdk.resources", "exporter.otlp.proto.grpc.trace_exporter"])
def test_without_the_library_of_export_a_worker_warns_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, absent: str
) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, f"opentelemetry.{absent}", None)
    tracer = tracer_of({"OTEL_EXPORT_ENABLED": "true"}, "agg", "1")
    assert tracer.begin("request", "r", None, None) is NO_SPAN
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "OTEL_EXPORT_ENABLED" in record.message
    assert "pip install 'trtllm-disagg[otel]'" in record.message


def test_unknown_otlp_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OTEL_EXPORT_ENABLED": "true", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL.*grpc, http/protobuf"):
        tracer_of(environment, "agg", "1")
