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
from trtllm_disagg.tools.bench.aiperf import AIPerf, Load, LoadFailedError, front, rates_of, read_sweep
from trtllm_disagg.tools.plan.slo import Slo
from trtllm_disagg.tools.plan.workloads import BUILT_IN

#: Two rates, 20 requests each, of which only the read metrics are kept.
RECORDED = Path(__file__).parent / "aiperf-0.13.0"
LOAD = Load(
    url="http://127.0.0.1:1",
    model="model",
    tokenizer=Path("model"),
    traffic=BUILT_IN["chat"].aiperf,
    rates=(4.0, 8.0),
    requests=20,
    slo=Slo(ttft=500, tpot=30),
)


def script(directory: Path, text: str) -> AIPerf:
    file = directory / "aiperf"
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o755)
    return AIPerf(file)


def test_a_recorded_sweep_is_read_by_rate() -> None:
    slow, fast = read_sweep(RECORDED)
    assert (slow.rate, slow.ttft_p50, slow.good_share, slow.error_percent) == (4.0, 15.852699, 1.0, 0.0)
    assert fast.rate == 8.0
    assert fast.tokens_s > slow.tokens_s


def test_a_failed_request_is_no_good_one(tmp_path: Path) -> None:
    sweep = json.loads((RECORDED / "sweep_aggregate" / "profile_export_aiperf_sweep.json").read_text())
    sweep["per_combination_metrics"][0]["metrics"]["request_error_rate"]["avg"] = 25.0
    (tmp_path / "sweep_aggregate").mkdir()
    (tmp_path / "sweep_aggregate" / "profile_export_aiperf_sweep.json").write_text(json.dumps(sweep))
    assert read_sweep(tmp_path)[0].good_share == 0.75


def test_a_sweep_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep_aggregate").mkdir()
    (tmp_path / "sweep_aggregate" / "profile_export_aiperf_sweep.json").write_text('{"metadata": {}}')
    with pytest.raises(LoadFailedError, match=r"0\.13\.0"):
        read_sweep(tmp_path)


async def test_aiperf_gets_rates_limits_and_traffic_and_its_results_are_read(tmp_path: Path) -> None:
    copies = f"import shutil, sys; shutil.copytree(r'{RECORDED}', sys.argv[-1], dirs_exist_ok=True)"
    (tmp_path / "load").mkdir()
    results = await script(tmp_path, copies).sweep(LOAD, tmp_path / "load")
    assert [result.rate for result in results] == [4.0, 8.0]
    argv = shlex.split((tmp_path / "load" / "command").read_text())
    flags = dict(pairwise(argv))
    assert (flags["--request-rate"], flags["--request-count"], flags["--isl"]) == ("4,8", "20", "256")
    assert flags["--goodput"] == "time_to_first_token:500 inter_token_latency:30"
    assert flags["--connection-reuse-strategy"] == "never"
    turns = replace(LOAD, traffic=BUILT_IN["agentic"].aiperf).flags(tmp_path)
    assert "chat" in turns
    assert "completions" in argv


async def test_a_failure_shows_the_last_lines_of_its_log(tmp_path: Path) -> None:
    aiperf = script(tmp_path, "print('no such model'); raise SystemExit(3)")
    with pytest.raises(LoadFailedError, match=r"exit code 3(.|\n)*no such model"):
        await aiperf.sweep(LOAD, tmp_path)


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
