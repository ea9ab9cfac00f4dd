"""A command that SIGTERM ends has cleaned up, as after Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_disagg.common.exits import ExitCode

# Not in one sleep: a signal between Python's last look for one and the system call is not seen before its end.
WAITS = "print(flush=True); [time.sleep(0.05) for _ in range(1200)]"
WAITS_IN_A_LOOP = """
    async def wait():
        try:
            print(flush=True)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            (scratch / "ended").touch()
    asyncio.run(wait())
"""
COMMAND = """
import asyncio, shutil, signal, sys, time
from pathlib import Path
from trtllm_disagg.common.exits import ending_as_on_ctrl_c
scratch = Path(sys.argv[1])
{before}
with ending_as_on_ctrl_c():
    try:
        {body}
    finally:
        (scratch / "removed").touch()
"""


IN_BACKGROUND = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("number", "code", "repeated", "body", "before"),
    [
        (signal.SIGTERM, ExitCode.TERMINATED, 1, WAITS, ""),
        (signal.SIGTERM, ExitCode.TERMINATED, 2, WAITS_IN_A_LOOP, IN_BACKGROUND),
        (signal.SIGTERM, ExitCode.TERMINATED, 2, WAITS, IN_BACKGROUND),
        (signal.SIGHUP, ExitCode.HANGUP, 1, WAITS_IN_A_LOOP, ""),
        (signal.SIGHUP, ExitCode.HANGUP, 2, WAITS, IN_BACKGROUND),
    ],
)
def test_command_that_is_terminated_cleans_up_and_ends_with_the_signals_code(
    number: signal.Signals, code: ExitCode, repeated: int, body: str, before: str, tmp_path: Path
) -> None:
    text = COMMAND.format(before=before, body=body.strip().replace("\n    ", "\n        "))
    command = subprocess.Popen([sys.executable, "-c", text, tmp_path], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    with command, command.stdout:
        command.stdout.readline()
        for _ in range(repeated):
            command.send_signal(number)
        assert command.wait(30) == code
    assert {path.name for path in tmp_path.iterdir()} >= {"removed"}
    assert (tmp_path / "ended").exists() is ("ended" in body)


def test_signal_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    text = COMMAND.format(
        before="signal.signal(signal.SIGHUP, signal.SIG_IGN)", body="signal.raise_signal(signal.SIGHUP)"
    )
    assert subprocess.run([sys.executable, "-c", text, tmp_path], check=False).returncode == 0


LATE_SIGNAL = """
import os, signal
from trtllm_disagg.common.exits import ending_as_on_ctrl_c
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
late = Late()
with ending_as_on_ctrl_c():
    signal.raise_signal(signal.SIGTERM)
"""


def test_a_late_signal_amid_the_exit_does_not_change_the_exit_code() -> None:
    assert subprocess.run([sys.executable, "-c", LATE_SIGNAL], check=False).returncode == ExitCode.TERMINATED
