"""Ctrl-C while a command is at work: it ends with the code for that and no traceback, and what it started is gone."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import psutil
import pytest

from tests.support.deployments import ROOT, wait_until
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.tools.up.command_socket import COMMAND_SOCKET
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.run_dir import RunDir

#: Imports, on a busy machine; and how long a deployment that loads may take to end.
START_SECONDS, END_SECONDS = 60.0, 60.0


@dataclass(frozen=True)
class Silent:
    """A server that takes connections and says nothing, on both kinds of socket."""

    tcp: socket.socket
    unix: socket.socket

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.tcp.getsockname()[1]}"

    @property
    def run_dir(self) -> Path:
        return Path(self.unix.getsockname()).parent

    def is_asked(self, command: psutil.Process, directory: Path) -> bool:
        for listening in (self.tcp, self.unix):
            try:
                listening.accept()[0].detach()  # it stays open, and ends with this process
            except BlockingIOError:
                continue
            return True
        return False


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Silent]:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind((LOOPBACK, 0))
        unix.bind(str(run_dir / COMMAND_SOCKET))
        for listening in (tcp, unix):
            listening.listen()
            listening.setblocking(False)
        yield Silent(tcp, unix)


IsAtWork = Callable[[psutil.Process, Path], bool]


def has_children(command: psutil.Process, directory: Path) -> bool:
    return bool(command.children())


def has_begun(command: psutil.Process, directory: Path) -> bool:
    """It has told its user what it does."""
    return (directory / "said").stat().st_size > 0


ON_ITS_OWN: dict[str, IsAtWork] = {
    "trtllm_disagg demo-model {directory}/model": has_begun,
    "benchmarks.overhead --quick --strategy agg": has_children,
}
CLIENTS = ("doctor --url {url}", "top --once --url {url}", "switch --run-dir {run_dir} --to prefill_first")


def interrupted(words: str, directory: Path, is_at_work: IsAtWork) -> tuple[int, str]:
    """As a terminal does it: the command and what shares its group hear of it. The exit code, and what it said."""
    said = directory / "said"
    with said.open("wb") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", *words.split()],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    command = psutil.Process(running.pid)
    started = [command]
    try:
        wait_until(lambda: is_at_work(command, directory), f"{words} is at work", START_SECONDS)
        started += command.children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)
        code = running.wait(END_SECONDS)
        _, left = psutil.wait_procs(started, timeout=END_SECONDS)
        assert left == []
    finally:
        for process in started:
            if process.is_running():
                process.kill()
        running.wait()
    return code, said.read_text()


@pytest.mark.parametrize("words", ON_ITS_OWN)
def test_ctrl_c_ends_a_command_that_works_and_all_that_it_started(words: str, tmp_path: Path) -> None:
    code, said = interrupted(words.format(directory=tmp_path), tmp_path, ON_ITS_OWN[words])
    assert "Traceback" not in said
    assert code == ExitCode.INTERRUPTED


@pytest.mark.parametrize("words", CLIENTS)
def test_ctrl_c_ends_a_command_that_waits_for_an_answer(words: str, silent: Silent, tmp_path: Path) -> None:
    asked = f"trtllm_disagg {words}".format(url=silent.url, run_dir=silent.run_dir)
    code, said = interrupted(asked, tmp_path, silent.is_asked)
    assert "Traceback" not in said
    assert code == ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_a_signal_ends_the_live_screen_and_gives_the_terminal_back(
    number: signal.Signals, code: ExitCode, tmp_path: Path
) -> None:
    RunDir.claim(tmp_path / "run")
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs, "rb") as other:
        top = subprocess.Popen(
            [sys.executable, "-m", "trtllm_disagg", "top", "--run-dir", str(tmp_path / "run")],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        try:
            shown = read_until(terminal, b"TTFT")
            assert ALTERNATE in shown
            top.send_signal(number)
            assert MAIN in read_until(terminal, MAIN)
            assert top.wait(END_SECONDS) == code
        finally:
            top.kill()
            top.wait()
        assert termios.tcgetattr(other) == before


#: Of a terminal's screens: a program's own, and the one with what was said before.
ALTERNATE, MAIN = b"\x1b[?1049h", b"\x1b[?1049l"


def read_until(terminal: FileIO, awaited: bytes) -> bytes:
    said = b""
    while awaited not in said:
        assert select.select([terminal], [], [], START_SECONDS)[0], f"only {said[-500:]!r} was said"
        said += terminal.read(65536)
    return said
