"""Spans as lines of OTLP/JSON, written and read."""

from __future__ import annotations

import json
import math
import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tracing import write
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.trace.otlp_file import read_spans
from trtllm_disagg.tracing.spans import SpanData, SpanEvent
from trtllm_disagg.tracing.trace_file import OLD_SUFFIX, TraceFile

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
ROOT = SpanData(
    "request",
    TRACE_ID,
    "00f067aa0ba902b7",
    "00f067aa0ba90200",
    1_700_000_000_000_000_001,
    1_700_000_000_500_000_001,
    {"n": 1, "share": 0.5, "text": "a", "yes": True, "reasons": ["stop", "length"]},
    [SpanEvent("first_token", 1_700_000_000_100_000_001, {"index": 0})],
    "ValueError: no",
    is_remote=True,
)
CHILD = SpanData("prefill", TRACE_ID, "00f067aa0ba902b8", ROOT.span_id, ROOT.start, ROOT.end)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    write(file, [CHILD, ROOT])
    read = list(read_spans(file))
    assert [each.data for each in read] == [CHILD, ROOT]
    assert {each.scope for each in read} == {"trtllm_disagg"}
    assert read[0].resource == {"service.name": "dynamo"}


def test_trace_file_lines_are_otlp(tmp_path: Path) -> None:
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    file = tmp_path / "a.jsonl"
    write(file, [ROOT])
    batch = json.loads(file.read_text())
    message = ParseDict(batch, ExportTraceServiceRequest())
    (span,) = message.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.start_time_unix_nano, span.status.code) == ("request", ROOT.start, 2)


def test_full_trace_file_replaces_the_old_one_or_grows_if_it_cannot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, old = tmp_path / "a.jsonl", tmp_path / f"a.jsonl{OLD_SUFFIX}"
    for span in (CHILD, ROOT):
        write(file, [span], max_bytes=1)
        assert [each.data for each in read_spans(old)] == [span]
        assert not file.exists()
    old.unlink()
    old.mkdir()
    write(file, [CHILD], [ROOT], max_bytes=1)
    assert [each.data for each in read_spans(file)] == [CHILD, ROOT]
    assert "grows beyond its limit" in caplog.text


def test_unserialisable_span_is_dropped_and_later_ones_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    broken = replace(ROOT, attributes={"what": object()})  # type: ignore[dict-item]
    write(file, [broken], [CHILD])
    assert [each.data for each in read_spans(file)] == [CHILD]
    assert "spans are lost" in caplog.text


def test_spans_dropped_during_a_blocked_write_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe that is not read is such a disk."""
    file = tmp_path / "pipe"
    os.mkfifo(file)
    traces = TraceFile(file, {}, max_waiting=2)
    for _ in range(5):
        traces.take([CHILD, ROOT])
    assert traces.num_dropped == 6
    read_end = os.open(file, os.O_RDONLY)
    traces.close()
    lines = os.read(read_end, 1 << 16).splitlines()
    os.close(read_end)
    assert len(lines) == 2
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"{file}: spans are lost: the disk does not keep up", f"{file}: 6 spans were lost"]


def test_span_line_that_does_not_fit_on_the_disk_is_not_written_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    write(file, [ROOT])
    half, (_, hard) = file.stat().st_size * 3 // 2, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, hard))
    try:
        write(file, [ROOT])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    write(file, [CHILD])
    assert [each.data for each in read_spans(file)] == [ROOT, CHILD]


def test_unwritable_trace_file_fails_no_request_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "missing" / "a.jsonl", [ROOT], [ROOT])
    first, last = (record.getMessage() for record in caplog.records)
    assert "spans are lost: [Errno 2] No such file or directory" in first
    assert last.endswith("2 spans were lost")


def test_incomplete_line_of_a_trace_file_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    write(file, [ROOT])
    whole = file.read_bytes()
    file.write_bytes(whole + b"\n" + whole[:50])
    assert [each.data for each in read_spans(file)] == [ROOT]


@pytest.mark.parametrize("said", ['"Infinity"', '"NaN"'])
def test_a_number_that_json_does_not_have_is_read_as_text(said: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    write(file, [ROOT])
    file.write_text(file.read_text().replace('"doubleValue":0.5', f'"doubleValue":{said}'))
    (read,) = read_spans(file)
    assert read.data.attributes["share"] in ("inf", "nan")
    json.dumps(read.data.attributes, allow_nan=False)


def test_a_line_that_cannot_be_read_is_left_out_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """JSON has no number for NaN: it is written as null."""
    file = tmp_path / "a.jsonl"
    write(file, [ROOT], [replace(ROOT, attributes={"temperature": math.nan})], [CHILD])
    assert [each.data for each in read_spans(file)] == [ROOT, CHILD]
    (told,) = (record.getMessage() for record in caplog.records)
    assert re.match(r"skipping 1 of 3 lines: .*a\.jsonl.* line 2 is not", told)


def test_a_time_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [replace(ROOT, end=10**400)])
    with pytest.raises(ConfigError, match=r"line 1 is not.*a time beyond 64 bits"):
        list(read_spans(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    "text",
    [
        "no json\n",
        "[" * 100_000 + "\n",
        '{"spans": []}\n',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}\n',
    ],
)
def test_a_file_with_something_else_in_it_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"a\.jsonl.*expected lines of OTLP/JSON.*line 1"):
        list(read_spans(file))
    with pytest.raises(ConfigError, match=r"trace file: .*absent' "):
        list(read_spans(tmp_path / "absent"))
