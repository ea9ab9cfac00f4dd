"""Where a request's time went, from the logs of the processes that it passed through."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from trtllm_disagg.tools.bench.strategies.records import Arm, Parts, RequestRecord
from trtllm_disagg.tools.bench.strategies.spent import (
    EngineTimes,
    Lateness,
    RequestLogs,
    lateness_of,
    parts_of,
    software_share,
)

ORDER = Arm("1P1D prefill_first", "prefill_first")
PREFILL = EngineTimes(
    arrival=10.0, scheduled=10.1, first_token=10.3, last_token=10.3, transfer_start=0, transfer_end=0
)
DECODE = EngineTimes(
    arrival=10.32, scheduled=10.5, first_token=10.5, last_token=11.5, transfer_start=10.4, transfer_end=10.5
)


def test_parts_of_a_pair_follow_each_other_and_add_up() -> None:
    parts = parts_of([DECODE, PREFILL])
    assert parts is not None
    told = (parts.queue, parts.prefill, parts.handoff, parts.transfer, parts.decode_wait, parts.decode)
    assert told == pytest.approx((100, 200, 20, 100, 80, 1000))
    assert parts.total == pytest.approx((DECODE.last_token - PREFILL.arrival) * 1000)


def test_one_engine_for_both_has_no_way_between_them() -> None:
    parts = parts_of([PREFILL._replace(last_token=11.0)])
    assert parts is not None
    assert (parts.handoff, parts.transfer, parts.decode_wait) == (0, 0, 0)
    assert parts.total == pytest.approx(1000)


def test_a_prefill_that_was_done_twice_is_counted_once_and_waited_for() -> None:
    again = PREFILL._replace(arrival=10.35, scheduled=10.4, first_token=10.6, last_token=10.6)
    parts = parts_of([PREFILL, again])
    assert parts is not None
    assert (parts.queue, parts.prefill) == pytest.approx((400, 200))


@pytest.mark.parametrize("engines", [[], [DECODE], [PREFILL, DECODE, DECODE]])
def test_parts_without_all_engines_are_none(engines: list[EngineTimes]) -> None:
    assert parts_of(engines) is None


@pytest.mark.parametrize("prefix", ["request_trace", "journal"])
def test_logs_are_joined_by_the_frontends_name_of_the_request(tmp_path: Path, prefix: str) -> None:
    frontend = tmp_path / "frontend.log"
    frontend.write_text(
        "2026 INFO http-request: metrics: request completed request_id=theirs model=m status=success "
        'uri=/v1/completions x_request_id="ours" request_id=other\n'
    )
    engine = {
        "arrival_time": 10.0,
        "first_scheduled_time": 10.1,
        "first_token_time": 10.3,
        "last_token_time": 11.0,
    }
    worker = tmp_path / "agg-0.log"
    line = {"request": "theirs", "part": "agg/agg", "engine": engine}
    worker.write_text(
        f"14:00:00.000 INFO trtllm_disagg.handlers.trace: {prefix} {json.dumps(line)}\nnothing\n"
    )
    logs = RequestLogs(frontend, [worker])
    parts = logs.parts("ours")
    assert parts is not None
    assert parts.total == pytest.approx(1000)
    assert logs.parts("another") is None
    # Full logs have become predecessors.
    frontend.rename(tmp_path / "frontend.log.1")
    worker.rename(tmp_path / "agg-0.log.1")
    assert RequestLogs(frontend, [worker]).parts("ours") == parts


def test_software_is_what_is_beyond_the_modelled_parts_and_how_late_steps_were() -> None:
    parts = Parts(queue=10, prefill=80, handoff=7, transfer=20, decode_wait=3, decode=870)
    request = RequestRecord(0.0, 256, 88, 1000.0, 100.0, 10.0, parts=parts)
    share = software_share([request], ORDER, late_ms=1.0)
    assert share == pytest.approx({"ttft": 11 / 100, "tpot": (900 - 893 + 1) / 900, "latency": 18 / 1000})
    # The first token waits for the KV where the frontend chains both.
    late = RequestRecord(0.0, 256, 88, 1000.0, 123.0, 10.0, parts=parts)
    assert software_share([late], Arm("1P1D router", "router"), 0.0)["ttft"] == pytest.approx(10 / 123)


def test_without_parts_no_share_is_known() -> None:
    assert software_share([RequestRecord(0.0, 1, 1, 5.0)], ORDER, 0.0) == {}


def test_lateness_is_a_mean_over_the_steps_between_two_looks() -> None:
    assert Lateness(30, 0.5).since(Lateness(10, 0.1)) == pytest.approx(20)
    assert Lateness(10, 0.1).since(Lateness(10, 0.1)) == 0.0


def test_metrics_of_a_worker_here_are_read_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                b"trtllm_disagg_modelled_steps_total 4\ntrtllm_disagg_modelled_late_seconds_total 0.5\n"
            )

        def log_message(self, *args: object) -> None:
            """Not on stderr."""

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Handler) as worker:
        threading.Thread(target=worker.serve_forever, daemon=True).start()
        try:
            assert lateness_of(worker.server_port) == Lateness(4, 0.5)
        finally:
            worker.shutdown()
