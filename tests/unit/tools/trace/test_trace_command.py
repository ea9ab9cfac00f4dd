"""`trtllm-disagg trace`: the tree of a request in a terminal, as a page and for scripts."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest

from tests.support.tracing import write
from trtllm_disagg.common.cli import run
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.trace.reading import read_traces
from trtllm_disagg.tools.trace.waterfall import waterfall
from trtllm_disagg.tracing.spans import SpanData, SpanEvent, Value
from trtllm_disagg.tracing.trace_file import LONGEST_GAP, LONGEST_GAP_AFTER

#: (name, place in the tree, first and last millisecond)
SPANS = [
    ("request", None, 0, 100),
    ("prefill", 0, 1, 20),
    ("remote_decode", 0, 21, 99),
    ("dispatch", 2, 22, 70),
    ("relay", 2, 70, 99),
]
OF_DECODE = [("decode_stage", 3, 25, 98), ("kv_transfer", 5, 26, 66), ("decode_steps", 5, 68, 97)]
COLUMNS = 80


def spans_of(number: int, slower_ms: int) -> tuple[list[SpanData], list[SpanData]]:
    """Of the prefill and of the decode worker; a request a minute, of which `kv_transfer` takes longer."""
    made: list[SpanData] = []
    for place, (name, parent, start, end) in enumerate([*SPANS, *OF_DECODE]):
        at = (number * 60_000 + start + (slower_ms if start >= 66 else 0)) * 1_000_000
        until = (number * 60_000 + end + (slower_ms if end >= 66 else 0)) * 1_000_000
        parent_id = None if parent is None else made[parent].span_id
        span = SpanData(name, f"{number + 1:032x}", f"{number * 100 + place + 1:016x}", parent_id, at, until)
        made.append(span)
    made[0].attributes = {"gen_ai.request.id": f"id-{number}", "trtllm_disagg.strategy": "prefill_first"}
    made[0].events = [SpanEvent("first_token", made[1].end, {})]
    made[6].attributes = {"kv_transfer.bytes": 49152, "kv_transfer.gb_per_second": 0.004}
    made[7].error = "EngineError: <lost>"
    return made[: len(SPANS)], made[len(SPANS) :]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three requests, of which the second one was slow."""
    (tmp_path / "traces").mkdir()
    for number, slower_ms in enumerate((0, 400, 10)):
        for worker, spans in zip(("prefill-0", "decode-0"), spans_of(number, slower_ms), strict=True):
            write(tmp_path / "traces" / f"{worker}.jsonl", spans)
    return tmp_path


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert run(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_request_is_drawn_as_a_waterfall_in_eighty_columns(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, "cmpl-id-1", "--run-dir", run_dir)
    assert lines[0] == "request id-1: 500.0 ms, prefill_first, first token after 20.0 ms"
    rows = lines[1:9]
    assert [line.split()[0] for line in rows] == [
        *("prefill-0", "prefill", "remote_decode", "dispatch", "decode-0", "kv_transfer", "decode_steps"),
        "prefill-0",
    ]
    assert all(len(line) <= COLUMNS for line in rows)
    assert len({line.index("ms") for line in rows}) == 1
    bars = [line.count("█") + line.count("▏") for line in rows]
    assert bars[0] == max(bars)
    assert bars[5] > max(bars[6], bars[1])
    assert all(len(line) <= COLUMNS for line in lines)
    assert lines[9].startswith("most of it: decode-0 kv_transfer 440.0 ms (88%)")
    # Broken between words: "...5.0 ms" and then "(1%)".
    assert lines[10].endswith("%)")
    assert lines[11:] == [
        "decode-0 kv_transfer: 48 KiB, 0.004 GB/s",
        "decode-0 decode_steps: failed: EngineError: <lost>",
    ]


@pytest.mark.parametrize(
    ("gaps", "line"),
    [
        ((0.299, 0.300), "no token for 300.0 ms at decode-0, after its first 30"),
        ((0.300, 0.299), "no token for 299.0 ms at decode-0, after its first 30"),
        ((0.300, 0.010), "no token for 300.0 ms at prefill-0, after its first 31"),
        ((0.020, 0.020), None),
    ],
    ids=["at the second stage", "passed on", "on the way back", "none that is long"],
)
def test_longest_gap_is_shown_with_the_worker_that_caused_it(
    gaps: tuple[float, float], line: str | None, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = spans_of(3, 400)
    for place, span in enumerate((first[0], second[0])):
        span.attributes |= {LONGEST_GAP: gaps[place], LONGEST_GAP_AFTER: 31 - place}
    for worker, spans in zip(("prefill-0", "decode-0"), (first, second), strict=True):
        write(run_dir / "traces" / f"{worker}.jsonl", spans)
    lines = shown(capsys, "id-3", "--run-dir", run_dir)
    assert [each for each in lines if each.startswith("no token")] == ([] if line is None else [line])
    # The row of the worker that stood still is marked, not one that ended meanwhile.
    (trace,) = (each for each in read_traces(run_dir) if "id-3" in each.request_ids)
    (marked,) = (
        each.plain for each in waterfall(trace, 80) if any(s.style == "bold yellow" for s in each.spans)
    )
    assert ("dispatch" in marked) is (line is not None and "prefill-0" in line)
    picture = run_dir / "gap.svg"
    assert run(["trace", "--run-dir", str(run_dir), "id-3", "--html", str(picture)]) == 0
    assert ("no&#160;token&#160;for" in picture.read_text()) is (line is not None)


@pytest.mark.parametrize(("order", "shown_ms"), [("router", 60.0), ("decode_first", 20.0)])
def test_the_first_token_is_the_one_that_the_client_gets(order: str, shown_ms: float, tmp_path: Path) -> None:
    """Under router the frontend gets one token of the prefill worker, and keeps it until decode has begun."""
    (tmp_path / "traces").mkdir()
    for number, (worker, start, first, end) in enumerate(
        (("prefill-0", 0, 20, 21), ("decode-0", 30, 60, 90))
    ):
        at, told, until = (each * 1_000_000 for each in (start, first, end))
        span = SpanData("request", f"{1:032x}", f"{number + 1:016x}", None, at, until)
        span.attributes = {"gen_ai.request.id": "id-0", "trtllm_disagg.strategy": order}
        span.events = [SpanEvent("first_token", told, {})]
        write(tmp_path / "traces" / f"{worker}.jsonl", [span])
    (trace,) = read_traces(tmp_path)
    assert trace.first_token_ms == shown_ms


def test_a_long_headline_is_broken_between_words(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_prefill, _ = spans_of(5, 0)
    of_prefill[0].attributes |= {"gen_ai.request.id": "chatcmpl-" + 4 * "c5cd0580-"}
    write(run_dir / "traces" / "prefill-0.jsonl", of_prefill)
    first, second, *_ = shown(capsys, "--run-dir", run_dir)
    assert f"{first} {second}".endswith(": 100.0 ms, prefill_first, first token after 20.0 ms")
    assert max(len(first), len(second)) <= COLUMNS


def test_the_last_and_the_slowest_requests_are_found(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str) -> list[str]:
        lines = shown(capsys, "--run-dir", run_dir, *arguments)
        return [line.split()[1].rstrip(":") for line in lines if line.startswith("request ")]

    assert told() == ["id-2"]
    assert told("--last", "2") == ["id-1", "id-2"]
    assert told("--slowest", "2") == ["id-1", "id-2"]
    assert told("--last", "9") == ["id-0", "id-1", "id-2"]


def test_a_request_of_which_only_the_prefill_is_written_is_not_the_last_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = SpanData("prefill_stage", f"{9:032x}", f"{9:016x}", None, 600_000_000_000, 600_070_000_000)
    running.attributes = {"gen_ai.request.id": "id-9"}
    write(run_dir / "traces" / "prefill-0.jsonl", [running])
    assert shown(capsys, "--run-dir", run_dir)[0].startswith("request id-2: ")
    assert shown(capsys, "--run-dir", run_dir, "--slowest", "9")[0].startswith("request id-1: ")
    asked = shown(capsys, "--run-dir", run_dir, "id-9")
    assert asked[0] == "request id-9: 70.0 ms, not ended yet"


@pytest.fixture
def cancelled(tmp_path: Path) -> Path:
    """One request: its KV did not come, which all spans around it failed with, and then its client left."""
    (tmp_path / "traces").mkdir()
    of_prefill, of_decode = spans_of(0, 0)
    for span in (of_prefill[2], of_prefill[3], of_decode[0]):
        span.error = "KvTransferError: lost"
    of_prefill[0].events.append(SpanEvent("breaker_open", of_prefill[1].end, {"instances": ["1a", "2b"]}))
    of_prefill[0].events.append(SpanEvent("cancelled", of_prefill[0].end, {"tokens": 1}))
    for worker, spans in (("prefill-0", of_prefill), ("decode-0", of_decode)):
        write(tmp_path / "traces" / f"{worker}.jsonl", spans)
    return tmp_path


def test_failures_are_printed_once_and_below_the_picture(
    cancelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, "--run-dir", cancelled)
    told = lines[lines.index("prefill-0 request: breaker_open instances 1a 2b") :]
    assert told == [
        "prefill-0 request: breaker_open instances 1a 2b",
        "prefill-0 request: cancelled tokens 1",
        "prefill-0 remote_decode: failed: KvTransferError: lost",
        "decode-0 kv_transfer: 48 KiB, 0.004 GB/s",
        "decode-0 decode_steps: failed: EngineError: <lost>",
    ]


def test_trace_json_has_every_span_with_its_worker(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = json.loads("\n".join(shown(capsys, "id-1", "--run-dir", run_dir, "--json")))
    assert (told["request_ids"], told["order"], told["ms"], told["first_token_ms"]) == (
        ["id-1"],
        "prefill_first",
        500.0,
        20.0,
    )
    assert told["longest"][0] == {"worker": "decode-0", "span": "kv_transfer", "ms": 440.0}
    assert sum(each["ms"] for each in told["longest"]) == pytest.approx(told["ms"])
    assert [span["span"] for span in told["spans"]][:2] == ["request", "prefill"]


def test_trace_html_and_svg_load_nothing_else(run_dir: Path) -> None:
    page, picture = run_dir / "two.html", run_dir / "one.svg"
    assert run(["trace", "--run-dir", str(run_dir), "--slowest", "2", "--html", str(page)]) == 0
    assert run(["trace", "--run-dir", str(run_dir), "id-1", "--html", str(picture)]) == 0
    for text, requests in ((page.read_text(), ["id-1", "id-2"]), (picture.read_text(), ["id-1"])):
        assert not re.search("<script|src=|url\\(http|<link", text)
        assert re.findall(r"id-\d", re.sub('title="[^"]*"', "", text)) == requests
    ET.parse(picture)
    parts = picture.read_text().split("@media (prefers-color-scheme: dark)")
    light, dark = (re.findall(r"-r\d+ \{ fill", part) for part in parts)
    assert light == dark != []
    (row,) = (line for line in page.read_text().splitlines() if "kv_transfer: 440.0 ms from 26.0 ms" in line)
    assert row.startswith('<div title="decode-0 kv_transfer: ')
    assert "kv_transfer.bytes: 49152" in page.read_text()
    # On one scale: the slow request fills it.
    long, short = (line.count("█") for line in page.read_text().splitlines() if " request " in line)
    assert short == pytest.approx(long * 110 / 500, abs=1)


def test_perfetto_file_has_complete_events_that_nest_in_named_processes(run_dir: Path) -> None:
    file = run_dir / "trace.json"
    assert run(["trace", "--run-dir", str(run_dir), "--last", "3", "--perfetto", str(file)]) == 0
    events = json.loads(file.read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert sorted(names.values()) == ["decode-0", "prefill-0"]
    spans = [each for each in events if each["ph"] == "X"]
    assert len(spans) == 3 * (len(SPANS) + len(OF_DECODE))
    (slow,) = (each for each in spans if each["name"] == "kv_transfer" and each["args"]["request"] == "id-1")
    assert (slow["dur"], names[slow["pid"]]) == (440_000.0, "decode-0")
    assert {each["name"] for each in events if each["ph"] == "i"} == {"first_token"}
    for one, other in combinations(spans, 2):
        if (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
            begin = max(one["ts"], other["ts"])
            end = min(one["ts"] + one["dur"], other["ts"] + other["dur"])
            assert begin >= end or end - begin == pytest.approx(min(one["dur"], other["dur"]))


def test_a_collectors_file_is_read_as_well(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spans of other programs are shown, traces without one of ours are not."""
    file = run_dir / "collected.jsonl"
    resource = {"trtllm_disagg.worker": "agg", "service.instance.id": "12345"}
    write(file, spans_of(0, 0)[0], resource=resource)
    theirs = json.loads(file.read_text().replace(f"{1:032x}", f"{9:032x}"))
    theirs["resourceSpans"][0]["scopeSpans"][0]["scope"]["name"] = "another"
    with file.open("a") as out:
        out.write(json.dumps(theirs) + "\n")
    assert [trace.trace_id for trace in read_traces(file)] == [f"{1:032x}"]
    assert "agg-2345" in "\n".join(shown(capsys, "--otlp-file", file))


def test_characters_that_a_terminal_obeys_are_not_printed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / "collected.jsonl"
    spans = spans_of(0, 0)[0]
    spans[0].name = "window\x1b]0;title\x07"
    spans[0].events = [SpanEvent("\x9b2J", spans[0].start, {"why": "\x1b[31m"})]
    spans[1].error = "clear\x1b[2J"
    write(file, spans, resource={"trtllm_disagg.worker": "ag\x1bg"})
    text = "\n".join(shown(capsys, "--otlp-file", file))
    assert "window\ufffd]0;title\ufffd" in text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)


def test_names_and_ids_of_a_file_are_as_harmless_as_its_values(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / "collected.jsonl"
    span = SpanData("request", "trace\x1b[2J", "span\x1b[2J", None, 0, 1_000_000)
    span.events = [SpanEvent("retry", 0, {"why\x1b[2J": "lost"})]
    write(file, [span])
    text = "\n".join(shown(capsys, "--otlp-file", file))
    assert "request trace\ufffd[2j" in text
    assert "retry why\ufffd[2J lost" in text
    picture = run_dir / "picture.svg"
    shown(capsys, "--otlp-file", file, "--html", picture)
    ET.parse(picture)


@pytest.mark.parametrize(
    "attributes", [{"kv_transfer.bytes": 5}, {"kv_transfer.bytes": "many", "kv_transfer.gb_per_second": 1.0}]
)
def test_transfer_of_another_version_is_left_out(
    attributes: dict[str, Value], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / "collected.jsonl"
    write(file, [SpanData("request", "1" * 32, "2" * 16, None, 0, 1_000_000, attributes)])
    assert "KiB" not in "\n".join(shown(capsys, "--otlp-file", file))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["id-7"], r"REQUEST_ID.*id-7.*one of the 3 traced requests.*id-0, id-1, id-2"),
        (["--last", "0"], r"'0' is not allowed; expected a number from 1"),
        (["--last", "2", "--slowest", "2"], "not allowed with"),
        (["--last", "2", "--html", "x.svg"], r"--html.*x\.svg.*\.html for more than one"),
        (["--html", "x.html", "--json"], "give only one of --html, --perfetto and --json"),
        (["--html", "/nowhere/x.html"], "--html: '/nowhere/x.html' is not allowed; .*No such file"),
    ],
)
def test_trace_of_an_unknown_request_is_refused_with_what_can_be_shown(
    arguments: list[str], told: str, run_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        run(["trace", "--run-dir", str(run_dir), *arguments])


def test_a_directory_that_is_no_run_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--run-dir.*a run directory of"):
        run(["trace", "--run-dir", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"--run-dir.*nowhere.*a run directory of"):
        run(["trace", "--run-dir", str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match=r"--otlp-file.*nowhere.*a file of OTLP/JSON"):
        run(["trace", "--otlp-file", str(tmp_path / "nowhere")])
    (tmp_path / "traces").mkdir()
    with pytest.raises(ConfigError, match="no request has been traced"):
        run(["trace", "--run-dir", str(tmp_path)])


def spans_below_each_other(number: int) -> list[SpanData]:
    return [SpanData("request", "1" * 32, f"{i:016x}", f"{i - 1:016x}", i, 10_000) for i in range(number)]


def test_spans_that_are_above_themselves_are_roots(tmp_path: Path) -> None:
    first, second, third = spans_below_each_other(3)
    first.parent_id = second.span_id
    write(tmp_path / "spans.jsonl", [first, second, third])
    (trace,) = read_traces(tmp_path / "spans.jsonl")
    assert [node.span.span_id for node in trace.roots] == [first.span_id, second.span_id]
    assert [node.depth for node in trace.nodes] == [0, 0, 1]


def test_spans_below_each_other_are_read_however_many_they_are(tmp_path: Path) -> None:
    write(tmp_path / "spans.jsonl", spans_below_each_other(1200))
    (trace,) = read_traces(tmp_path / "spans.jsonl")
    assert [node.depth for node in trace.nodes] == list(range(1200))


@pytest.mark.parametrize(
    "attributes",
    [
        {LONGEST_GAP: 1.0},
        {LONGEST_GAP: "x", LONGEST_GAP_AFTER: 1},
        {LONGEST_GAP: 1.0, LONGEST_GAP_AFTER: "inf"},
    ],
)
def test_gap_of_another_version_is_left_out(tmp_path: Path, attributes: dict[str, str | int | float]) -> None:
    (span,) = spans_below_each_other(1)
    span.attributes |= attributes
    write(tmp_path / "spans.jsonl", [span])
    assert read_traces(tmp_path / "spans.jsonl")[0].longest_gap is None
