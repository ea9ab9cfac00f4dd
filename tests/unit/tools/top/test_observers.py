"""What `top` sees of a deployment, above all of one in which something is dead or stands still."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from trtllm_disagg.common.machine import birth
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.top import observers
from trtllm_disagg.tools.top.observers import RunDirObserver, frontend_of, load_of, observer_of
from trtllm_disagg.tools.top.snapshot import DEAD, EMPTY, SILENT, Histogram, WorkerLoad, latency
from trtllm_disagg.tools.up import http
from trtllm_disagg.tools.up.run_dir import ProcessRecord, RunDir

PAGE = """
# TYPE trtllm_disagg_requests_active gauge
trtllm_disagg_requests_active{dynamo_endpoint="generate"} 3.0
# TYPE dynamo_component_kvstats_active_blocks gauge
dynamo_component_kvstats_active_blocks{dp_rank="0"} 10.0
dynamo_component_kvstats_active_blocks{dp_rank="1"} 20.0
# TYPE dynamo_component_kvstats_total_blocks gauge
dynamo_component_kvstats_total_blocks{dp_rank="0"} 100.0
dynamo_component_kvstats_total_blocks{dp_rank="1"} 100.0
# TYPE trtllm_disagg_requests_total counter
trtllm_disagg_requests_total{fallback="none",strategy="decode_first"} 7.0
trtllm_disagg_requests_total{fallback="local",strategy="local"} 2.0
"""
DESCRIPTION = '{"instance": "1a2b", "role": "prefill", "strategy": "decode_first", "model": "m"}'


def test_load_sums_ranks_and_leaves_missing_metrics_unknown() -> None:
    load = load_of(PAGE)
    assert load == WorkerLoad(batch=3, kv_blocks=30, kv_blocks_total=200, fallbacks=2)
    assert load.kv_use == pytest.approx(0.15)


def test_invalid_metrics_page_gives_an_empty_load() -> None:
    assert load_of("<html>{{{") == WorkerLoad()


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf", "1e300"])
def test_metric_that_is_no_count_is_unknown(number: str) -> None:
    seen = frontend_of(f"dynamo_frontend_inflight_requests {number}\ndynamo_frontend_queued_requests 2\n")
    assert (seen.running, seen.waiting) == (None, 2)


@pytest.mark.parametrize(
    "bucket", ["{} 1", '{le="x"} 1', '{le="NaN"} 1', '{le="+Inf"} NaN', '{le="+Inf"} +Inf']
)
def test_histogram_without_bounds_or_counts_is_empty(bucket: str) -> None:
    assert frontend_of(f"dynamo_frontend_time_to_first_token_seconds_bucket{bucket}\n").ttft == EMPTY


def test_quantiles_of_latencies_are_those_of_prometheus() -> None:
    buckets = ((0.1, 50.0), (0.2, 90.0), (float("inf"), 100.0))
    found = latency(Histogram(buckets, 12.0))
    assert found is not None
    assert (found.count, found.mean, found.p50, found.p99) == (100, 0.12, 0.1, 0.2)
    later = latency(
        Histogram(((0.1, 50.0), (0.2, 91.0), (float("inf"), 101.0)), 12.15), Histogram(buckets, 12.0)
    )
    assert later is not None
    assert later.count == 1
    assert later.p50 == pytest.approx(0.15)
    assert latency(Histogram(buckets, 12.0), Histogram(buckets, 12.0)) is None
    assert latency(EMPTY) is None


def test_the_frontends_histograms_are_those_of_all_models_and_all_frontends() -> None:
    name = "dynamo_frontend_time_to_first_token_seconds"
    lines = [f"# TYPE {name} histogram"]
    for model in ("a", "b"):
        lines += [f'{name}_bucket{{le="{le}",model="{model}"}} 1' for le in ("0.5", "+Inf")]
        lines += [f'{name}_sum{{model="{model}"}} 0.25', f'{name}_count{{model="{model}"}} 1']
    page = PAGE + "\n".join(lines) + "\n"
    assert frontend_of(page + page).ttft == (((0.5, 4.0), (float("inf"), 4.0)), 1.0)


# -- processes


def record(name: str, port: int, *, pid: int = os.getpid(), state: str = "ready") -> ProcessRecord:
    """Of this process, unless told otherwise: it is alive."""
    role = name.partition("-")[0]
    ports = {"http" if role == "frontend" else "system": port}
    return ProcessRecord(name, role, pid, ports, f"{name}.log", state, birth(pid) or 1)


@asynccontextmanager
async def worker_page(host: str = "127.0.0.1") -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        body = DESCRIPTION if asked.startswith(b"POST /engine/") else PAGE
        writer.write(f"HTTP/1.0 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    server = await asyncio.start_server(answer, host, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextmanager
def frozen_page() -> Iterator[int]:
    """Connections are accepted by the system, as for a process that is stopped, and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_a_frozen_worker_a_dead_one_and_an_up_that_is_gone_show_as_such_beside_a_sound_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "TIMEOUT_SECONDS", 0.3)
    run_dir = RunDir.claim(tmp_path / "run")
    gone = 2**22 + 1
    async with worker_page() as sound:
        with frozen_page() as frozen:
            run_dir.write(
                [
                    record("prefill-0", sound),
                    record("decode-0", frozen),
                    record("decode-1", frozen, pid=gone),
                    record("decode-2", frozen, state="starting"),
                ]
            )
            seen = await asyncio.wait_for(RunDirObserver(run_dir.path).look(), 10)
    states = {process.name: process.state for process in seen.processes}
    assert states == {"prefill-0": "ready", "decode-0": SILENT, "decode-1": DEAD, "decode-2": "starting"}
    assert seen.processes[0].load.batch == 3
    assert seen.processes[1].load == WorkerLoad()
    assert [each.instance for each in seen.processes] == ["1a2b", None, None, None]
    assert seen.doubt == "`up` is starting, stopping or gone"


async def test_an_up_that_is_frozen_costs_a_look_its_deadline_also_when_its_socket_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers, "ANSWER_SECONDS", 0.1)
    run_dir = RunDir.claim(tmp_path / "run")
    with socket.socket(socket.AF_UNIX) as up:
        up.bind(str(run_dir.path / "commands.sock"))
        up.listen(1)
        observer = RunDirObserver(run_dir.path)
        for _ in range(5):
            seen = await asyncio.wait_for(observer.look(), 10)
            assert seen.doubt.startswith("`up` does not answer: ")


async def test_each_logged_warning_is_shown_once(tmp_path: Path) -> None:
    run_dir = RunDir.claim(tmp_path / "run")
    log = run_dir.log("decode-0")
    log.write_text("13:00:00.000 WARNING trtllm_disagg.x: before\n")
    observer = RunDirObserver(run_dir.path)
    assert (await observer.look()).warnings == ()
    with log.open("a") as more:
        more.write(
            "13:00:01.000 INFO trtllm_disagg.x: not this\n13:00:01.100 WARNING trtllm_disagg.x: skipped\n"
        )
    (run_dir.path / "gone.log").symlink_to(
        tmp_path / "nowhere"
    )  # as a log that moves between two looks at it
    assert (await observer.look()).warnings == ("decode-0: skipped",)
    assert (await observer.look()).warnings == ()


def test_a_directory_of_no_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--run-dir: .* is not allowed; expected the run directory of an `up`"
    ):
        observer_of(tmp_path, None)


async def test_the_first_look_reads_the_page_of_a_frontend_at_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = "127.0.0.2"
    run_dir = RunDir.claim(tmp_path / "run")

    def describe(*_: object, deadline: float) -> dict[str, str]:
        time.sleep(deadline / 10)  # in a thread, as long as a busy `up` may take
        return {"url": f"http://{host}:{port}"}

    monkeypatch.setattr(observers, "send_to_up", describe)
    async with worker_page(host) as port:
        run_dir.write([record("frontend", port)])
        shown = await RunDirObserver(run_dir.path).look()
    run_dir.release()
    assert [process.state for process in shown.processes] == ["ready"]


def test_a_url_without_a_frontend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--url: .* is not allowed"):
        observer_of(None, "http://127.0.0.1:1")
