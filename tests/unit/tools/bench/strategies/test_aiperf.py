"""AIPerf's command and what it leaves, by a recorded export of version 0.13.0; and that it never outlives its run."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.strategies.aiperf import AIPerf, LoadFailedError, Send, read_export

RECORDED = Path(__file__).parent / "aiperf-0.13.0"


def script(directory: Path, text: str) -> AIPerf:
    file = directory / "aiperf"
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o755)
    return AIPerf(file)


def test_a_recorded_export_is_read_in_milliseconds_and_tokens() -> None:
    first, second, warm, failed = read_export(RECORDED)
    assert (first.name, first.input_tokens, first.output_tokens, first.cached_tokens) == ("s0", 300, 32, 0)
    assert (first.ttft_ms, first.latency_ms) == (42.656303, 256.501957)
    assert first.tpot_ms == pytest.approx((first.latency_ms - 42.656303) / 31)
    assert sum(first.gaps_ms) == pytest.approx(first.latency_ms - 42.656303)
    assert (second.name, warm.name) == ("s1", "warm-0")
    assert failed.error == '400: {"message":"Invalid request","type":"Bad Request","code":400}'
    assert (failed.ttft_ms, failed.tpot_ms, failed.output_tokens) == (None, None, 0)


def test_an_answer_that_ended_without_its_usage_is_an_error(tmp_path: Path) -> None:
    line = json.loads((RECORDED / "profile_export.jsonl").read_text().splitlines()[0])
    del line["metrics"]["usage_completion_tokens"]
    (tmp_path / "profile_export.jsonl").write_text(json.dumps(line))
    (seen,) = read_export(tmp_path)
    assert seen.error == "the answer ended without its usage"


def test_an_export_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "profile_export.jsonl").write_text('{"metadata": {}}\n')
    with pytest.raises(LoadFailedError, match=r"profile_export.jsonl is not as version 0.13.0 writes it"):
        list(read_export(tmp_path))


async def test_it_gets_the_token_ids_of_every_request_and_connections_of_their_own(tmp_path: Path) -> None:
    told = "import json, os, sys; json.dump([sys.argv, os.environ['HF_HUB_OFFLINE']], open(r'{}', 'w'))"
    copies = f"import shutil, sys; shutil.copy(r'{RECORDED / 'profile_export.jsonl'}', sys.argv[-1])"
    aiperf = script(tmp_path, f"{told.format(tmp_path / 'told.json')}\n{copies}")
    sends = [Send("0-0", 0.0, (300, 301), 5), Send("0-1", 1.25, (302,), 6)]
    await aiperf.run(sends, "http://127.0.0.1:1", "model", tmp_path / "load", 60)
    argv, offline = json.loads((tmp_path / "told.json").read_text())
    assert offline == "1"
    assert argv[argv.index("--connection-reuse-strategy") + 1] == "never"
    assert "--fixed-schedule" in argv
    lines = [json.loads(line) for line in (tmp_path / "load" / "schedule.jsonl").read_text().splitlines()]
    assert [line["timestamp"] for line in lines] == [0, 1250]
    assert [line["payload"]["prompt"] for line in lines] == [[300, 301], [302]]
    assert [line["payload"]["max_tokens"] for line in lines] == [5, 6]
    assert all(line["payload"]["ignore_eos"] for line in lines)


async def test_a_failure_shows_the_last_lines_of_its_log(tmp_path: Path) -> None:
    aiperf = script(tmp_path, "print('no such model'); raise SystemExit(3)")
    with pytest.raises(LoadFailedError, match=r"exit code 3(.|\n)*no such model"):
        await aiperf.run([Send("0-0", 0.0, (1,), 1)], "http://127.0.0.1:1", "model", tmp_path / "load", 60)


@pytest.mark.parametrize(("sent", "is_whole"), [(4, True), (5, False)])
async def test_a_failure_with_an_export_of_every_request_is_read_from_it(
    sent: int, is_whole: bool, tmp_path: Path
) -> None:
    copies = f"import shutil, sys; shutil.copy(r'{RECORDED / 'profile_export.jsonl'}', sys.argv[-1])"
    aiperf = script(tmp_path, f"{copies}\nprint('none was answered'); raise SystemExit(1)")
    sends = [Send(f"0-{place}", 0.0, (1,), 1) for place in range(sent)]
    with nullcontext() if is_whole else pytest.raises(LoadFailedError, match="none was answered"):
        await aiperf.run(sends, "http://127.0.0.1:1", "model", tmp_path / "load", 60)


async def test_a_cancelled_run_leaves_no_process_of_its_own(tmp_path: Path) -> None:
    fifo = tmp_path / "children"
    os.mkfifo(fifo)
    starts = "import subprocess; child = subprocess.Popen(['sleep', '600'])"
    aiperf = script(tmp_path, f"{starts}\nopen(r'{fifo}', 'w').write(str(child.pid))\nchild.wait()")
    running = asyncio.create_task(
        aiperf.run([Send("0-0", 0.0, (1,), 1)], "http://127.0.0.1:1", "model", tmp_path / "load", 60)
    )
    child = os.pidfd_open(int(await asyncio.to_thread(fifo.read_text)))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    try:
        assert await asyncio.to_thread(select.select, [child], [], [], 30) == ([child], [], [])
    finally:
        os.close(child)


def test_a_command_that_is_not_there_is_refused_with_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--aiperf.*pip install 'trtllm-disagg\[bench\]'"):
        AIPerf.find(tmp_path / "aiperf")


def test_without_aiperf_the_error_says_how_to_get_it_and_where_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^AIPerf is missing; pip install 'trtllm-disagg\[bench\]'.*--aiperf"
    ):
        AIPerf.find(None)


def test_aiperf_is_found_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = script(tmp_path, "print('aiperf 0.13.0')")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert AIPerf.find(None) == there
    assert shutil.which("aiperf") == str(there.executable)
    assert there.version() == "0.13.0"
