"""The log of a process that runs for weeks takes a bounded place on the disk, and keeps its last lines."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import ProcessSpec
from trtllm_disagg.tools.up.run_dir import halves, move_to_predecessor

MAX_LOG_BYTES = 2000


def test_a_log_below_its_limit_stays_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "frontend.log"
    log.write_text("x" * (MAX_LOG_BYTES - 1))
    assert not move_to_predecessor(log, MAX_LOG_BYTES)
    assert halves(log) == [log]


def test_a_full_log_becomes_its_predecessor_and_its_writer_goes_on_at_its_begin(tmp_path: Path) -> None:
    log = tmp_path / "frontend.log"
    with log.open("ab", buffering=0) as writer:
        for text in (b"a", b"b"):
            writer.write(text * MAX_LOG_BYTES)
            assert move_to_predecessor(log, MAX_LOG_BYTES)
        writer.write(b"c")
    older, newer = halves(log)
    assert older.read_bytes() == b"b" * MAX_LOG_BYTES
    assert newer.read_bytes() == b"c"


async def test_log_of_a_writing_process_keeps_only_its_last_lines(tmp_path: Path) -> None:
    log, said = tmp_path / "frontend.log", tmp_path / "said"
    os.mkfifo(said)
    (tmp_path / "frontend.log.1").write_text("of the run before\n")
    spec = ProcessSpec("frontend", "frontend", ("/bin/cat", str(said)))
    process = ManagedProcess(spec, log, MAX_LOG_BYTES, look_seconds=0.01)
    async with asyncio.timeout(60):
        await process.start({})
        assert halves(log) == [log]
        ended = asyncio.create_task(process.wait())
        with await asyncio.to_thread(said.open, "wb", buffering=0) as writer:
            for text in (b"first ", b"second ", b"third "):
                writer.write(text * MAX_LOG_BYTES)
                while log.stat().st_size or not halves(log)[0].read_bytes().endswith(text):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            writer.write(b"last")
        await ended
    older, newer = halves(log)
    assert older.read_bytes() == b"third " * MAX_LOG_BYTES
    assert newer.read_bytes() == b"last"
    assert process.last_lines(1) == ["last"]
