"""What the frontend did for a request is read from its log, as it is in Dynamo 1.6.1."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.tracing import write
from trtllm_disagg.common.cli import run
from trtllm_disagg.tools.trace.reading import Stay, find_trace, read_stays, read_traces
from trtllm_disagg.tracing.spans import SpanData, SpanEvent

REQUEST = "d11ffbdf-2f2c-4160-a157-22d0123c72b6"
OTHER = "7aed683f-418d-4998-9d4d-bdef76adbbfd"
AS_TEXT = f"""\
2026-11-22T21:22:09.044000Z  INFO dynamo_kv_router::scheduling::selector: Selected worker router_mode="kv" \
request_id="{REQUEST}" worker_id=1 worker_type=decode dp_rank=0
2026-11-22T21:22:10.361934Z  INFO request_span: route request completed request_id={OTHER} request_id={REQUEST}
2026-11-22T21:22:10.362000Z  INFO http-request: dynamo_llm::http::service::metrics: request completed \
request_id={REQUEST} status=success elapsed_ms=1318 request_id={OTHER}
"""
AS_JSON = f"""\
{{"time":"2026-11-22T21:22:09.044000Z","message":"Selected worker","request_id":"{REQUEST}","worker_id":1}}
{{"time":"2026-11-22T21:22:10.362000Z","message":"request completed","elapsed_ms":"1318","request_id":"{REQUEST}"}}
"""


def at(milliseconds: int) -> int:
    """After 21:22:09, in nanoseconds."""
    return (int(datetime(2026, 11, 22, 21, 22, 9, tzinfo=UTC).timestamp()) * 1000 + milliseconds) * 1_000_000


@pytest.mark.parametrize("lines", [AS_TEXT, AS_JSON], ids=["text", "json"])
def test_arrival_routing_and_end_are_read_from_both_log_formats(lines: str, tmp_path: Path) -> None:
    log = tmp_path / "frontend.log"
    log.write_text(lines)
    assert read_stays(log) == {REQUEST: Stay(at(44), at(44), at(1362))}


@pytest.mark.parametrize(
    ("what", "instead"), [("=1318", "=" + "9" * 5000), ("2026-11-22T21:22:10", "2026-99-22T21:22:10")]
)
def test_numbers_that_no_frontend_writes_are_skipped(what: str, instead: str, tmp_path: Path) -> None:
    log = tmp_path / "frontend.log"
    log.write_text(AS_TEXT.replace(what, instead))
    assert read_stays(log) == {}


def test_an_id_that_the_client_gave_is_not_taken_for_the_requests(tmp_path: Path) -> None:
    log = tmp_path / "frontend.log"
    log.write_text(AS_TEXT.replace(" request_id=", f" x_request_id={OTHER} request_id="))
    assert read_stays(log) == {REQUEST: Stay(at(44), at(44), at(1362))}


def test_a_request_that_began_before_its_log_was_full_is_read_from_both_halves(tmp_path: Path) -> None:
    log = tmp_path / "frontend.log"
    chosen, *ended = AS_TEXT.splitlines(keepends=True)
    (tmp_path / "frontend.log.1").write_text(chosen)
    log.write_text("".join(ended))
    assert read_stays(log) == {REQUEST: Stay(at(44), at(44), at(1362))}


def test_time_between_frontend_call_and_worker_start_is_shown_at_that_worker(tmp_path: Path) -> None:
    log = tmp_path / "frontend.log"
    log.write_text(AS_TEXT.replace("09.044000Z", "09.054000Z"))
    (tmp_path / "traces").mkdir()
    span = SpanData("request", "1" * 32, "2" * 16, None, at(1000), at(1350), {"gen_ai.request.id": REQUEST})
    write(tmp_path / "traces" / "prefill-0.jsonl", [span])
    trace = find_trace(read_traces(tmp_path), REQUEST)
    assert [(node.worker, node.span.name, node.milliseconds) for node in trace.nodes] == [
        ("frontend", "http-request", 1318),
        ("frontend", "select", 10),
        ("frontend", "dispatch", 946),
        ("prefill-0", "request", 350),
    ]
    assert [(node.worker, node.span.name, ms) for node, ms in trace.blame[:2]] == [
        ("frontend", "dispatch", 946),
        ("prefill-0", "request", 350),
    ]


OUTER = "14190147-25c7-4468-9a64-0d14adf6415a"
MOVED = f"""\
2026-11-22T21:22:10.251000Z  INFO http-request: request_span: migration retry scheduled request.attempt=1 \
migration.is_retry=true migration.reason="disconnected" migration.from_worker_id=17 migration.tokens_completed=1085 \
method=POST uri=/v1/chat/completions version=HTTP/1.1 request_id={OUTER} model="demo-model"
"""
ENDED = f"""\
2026-11-22T21:22:11.000000Z {{level}} http-request: dynamo_llm::http::service::metrics: request completed \
request_id={REQUEST} model=demo-model request_type=stream {{status}} elapsed_ms=2000 method=POST version=HTTP/1.1 \
request_id={OUTER} model="demo-model" input_tokens=8 output_tokens={{tokens}} ttft_ms="24.80" avg_itl_ms="5.06"
"""
FAILED = "status=error error_type=unavailable error_detail=no backend worker available"


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (
            ENDED.format(level=" INFO", status="status=success", tokens=2000),
            "first token after 24.8 ms, taken over after 1,085 tokens, at 1251.0 ms",
        ),
        (
            ENDED.format(level="ERROR", status=FAILED, tokens=1085),
            "first token after 24.8 ms, failed: no backend worker available",
        ),
    ],
    ids=["taken over", "failed"],
)
def test_a_lost_worker_leaves_the_frontends_first_token_and_what_became_of_the_answer(
    ended: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "frontend.log").write_text(MOVED + ended)
    (tmp_path / "traces").mkdir()
    # Of the worker that took over: its first token is not the client's.
    span = SpanData("request", "1" * 32, "2" * 16, None, at(1300), at(1990), {"gen_ai.request.id": REQUEST})
    span.events = [SpanEvent("first_token", at(1310), {})]
    write(tmp_path / "traces" / "decode-1.jsonl", [span])
    assert run(["trace", "--run-dir", str(tmp_path)]) == 0
    headline = " ".join(capsys.readouterr().out.split("\nfrontend")[0].split())
    assert headline == f"request {REQUEST}: 2000.0 ms, {said}"
    assert run(["trace", "--run-dir", str(tmp_path), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["first_token_ms"] == pytest.approx(24.8)
    took = [{"after_tokens": 1085, "because": "disconnected", "at_ms": 1251.0}]
    failed = "failed" in said
    assert (told["taken_over"], told["error"]) == (
        ([], "no backend worker available") if failed else (took, None)
    )


def test_a_run_without_the_frontends_log_has_what_the_workers_did(tmp_path: Path) -> None:
    assert read_stays(tmp_path / "frontend.log") == {}
