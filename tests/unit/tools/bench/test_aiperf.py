"""AIPerf's command and what it leaves, by a recorded sweep of version 0.13.0; and that it never outlives its run."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shlex
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.aiperf import AIPerf, Load, LoadFailedError, front, read_results
from trtllm_disagg.tools.plan.slo import Slo
from trtllm_disagg.tools.plan.workloads import BUILT_IN, TraceLine, rates_of

#: Two rates, 8 requests each, of which only the read metrics are kept.
RECORDED = Path(__file__).parent / "aiperf-0.13.0"
EXPORT = "profile_export_aiperf.json"
LOAD = Load(
    url="http://127.0.0.1:1",
    model="model",
    tokenizer=Path("model"),
    traffic=BUILT_IN["chat"],
    rates=(1.0, 2.0),
    requests=20,
    slo=Slo(ttft=500, tpot=30),
)


def script(directory: Path, text: str) -> AIPerf:
    file = directory / "aiperf"
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o755)
    return AIPerf(file)


def test_a_recorded_sweep_is_read_by_rate() -> None:
    slow, fast = read_results(RECORDED)
    assert (slow.rate, fast.rate, slow.good_share) == (1.0, 2.0, 1.0)
    assert (slow.time_to_first_token.p50, slow.inter_token_latency.p99) == (57.026112, 26.33363726283777)
    assert fast.output_token_throughput.avg > slow.output_token_throughput.avg


def test_a_failed_request_is_no_good_one(tmp_path: Path) -> None:
    export = json.loads((RECORDED / "rate_1.0" / EXPORT).read_text())
    export["request_error_rate"]["avg"] = 25.0
    # The file of a run with one rate, which AIPerf does not call a sweep.
    (tmp_path / EXPORT).write_text(json.dumps(export))
    assert [result.good_share for result in read_results(tmp_path)] == [0.75]


def test_results_of_another_form_are_refused(tmp_path: Path) -> None:
    (tmp_path / EXPORT).write_text('{"metadata": {}}')
    with pytest.raises(LoadFailedError, match=r"0\.13\.0"):
        read_results(tmp_path)


async def test_aiperf_gets_rates_limits_and_traffic_and_its_results_are_read(tmp_path: Path) -> None:
    copies = f"import shutil, sys; shutil.copytree(r'{RECORDED}', sys.argv[-1], dirs_exist_ok=True)"
    (tmp_path / "load").mkdir()
    results = await script(tmp_path, copies).sweep(LOAD, tmp_path / "load")
    assert [result.rate for result in results] == [1.0, 2.0]
    argv = shlex.split((tmp_path / "load" / "command").read_text())
    flags = dict(pairwise(argv))
    assert (flags["--request-rate"], flags["--request-count"], flags["--isl"]) == ("1,2", "20", "256")
    assert flags["--goodput"] == "time_to_first_token:500 inter_token_latency:30"
    assert flags["--connection-reuse-strategy"] == "never"
    turns = replace(LOAD, traffic=BUILT_IN["agentic"]).flags(tmp_path)
    assert "chat" in turns
    assert "completions" in argv


async def test_a_failure_shows_the_last_lines_of_its_log(tmp_path: Path) -> None:
    aiperf = script(tmp_path, "print('no such model'); raise SystemExit(3)")
    with pytest.raises(LoadFailedError, match=r"exit code 3, results for 0 of 2(.|\n)*no such model"):
        await aiperf.sweep(LOAD, tmp_path)


async def test_a_rate_without_results_fails_the_sweep(tmp_path: Path) -> None:
    copies = f"import shutil, sys; shutil.copy(r'{RECORDED}/rate_1.0/{EXPORT}', sys.argv[-1])"
    with pytest.raises(LoadFailedError, match="results for 1 of 2 rates"):
        await script(tmp_path, copies).sweep(LOAD, tmp_path)


async def test_aiperf_finds_the_tokenizer_in_a_cache_and_a_trace_with_the_lines_that_fit(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    line = TraceLine(0.0, 600, 40, (1, 2))
    load = replace(
        LOAD, tokenizer=tmp_path / "model", traffic=replace(LOAD.traffic, lines=(line,)), rates=(1.0,)
    )
    looks = "import os, pathlib, sys; cached = pathlib.Path(os.environ['HF_HUB_CACHE'], 'models--bench--tokenizer')\n"
    looks += "print((cached / 'snapshots' / (cached / 'refs' / 'main').read_text()).resolve())\n"
    looks += f"import shutil; shutil.copy(r'{RECORDED}/rate_1.0/{EXPORT}', sys.argv[-1])"
    (tmp_path / "load").mkdir()
    await script(tmp_path, looks).sweep(load, tmp_path / "load")
    assert (tmp_path / "load" / "aiperf.log").read_text().strip() == str((tmp_path / "model").resolve())
    flags = dict(pairwise(load.flags(tmp_path / "load")))
    assert flags["--tokenizer"] == "bench/tokenizer"
    written = json.loads((tmp_path / "load" / "trace.jsonl").read_text())
    assert flags["--input-file"] == str(tmp_path / "load" / "trace.jsonl")
    assert written == {"timestamp": 0.0, "input_length": 600, "output_length": 40, "hash_ids": [1, 2]}


async def test_a_cancelled_run_leaves_no_process_of_its_own(tmp_path: Path) -> None:
    fifo = tmp_path / "children"
    os.mkfifo(fifo)
    starts = "import subprocess; child = subprocess.Popen(['sleep', '600'])"
    aiperf = script(tmp_path, f"{starts}\nopen(r'{fifo}', 'w').write(str(child.pid))\nchild.wait()")
    running = asyncio.create_task(aiperf.sweep(LOAD, tmp_path))
    child = os.pidfd_open(int(await asyncio.to_thread(fifo.read_text)))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    try:
        assert await asyncio.to_thread(select.select, [child], [], [], 30) == ([child], [], [])
    finally:
        os.close(child)


def test_a_command_that_is_not_there_is_refused_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--aiperf.*pip install 'trtllm-disagg\[bench\]'"):
        AIPerf.find(tmp_path / "aiperf")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"AIPerf is missing; pip install 'trtllm-disagg\[bench\]'.*--aiperf"
    ):
        AIPerf.find(None)
    there = script(tmp_path, "print('aiperf 0.13.0')")
    assert AIPerf.find(None) == there
    assert shutil.which("aiperf") == str(there.executable)


def test_pareto_points_are_those_that_no_other_point_beats_in_both() -> None:
    assert list(front([(1, 9), (2, 5), (3, 6), (4, 1), (3, 2)])) == [(4, 1), (3, 6), (1, 9)]


@pytest.mark.parametrize("text", ["", "0", "a", "1,-2", "nan", "1e9"])
def test_wrong_rates_are_refused(text: str) -> None:
    assert rates_of("4,2,4") == (2.0, 4.0)
    with pytest.raises(ConfigError, match="--rates"):
        rates_of(text)
