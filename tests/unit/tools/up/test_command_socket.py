"""The socket of `up`: its users, what it takes, and how it answers. The supervisor starts real processes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.commanded_up import tell, worker_config
from trtllm_disagg.admin.commands import Set
from trtllm_disagg.common.machine import birth
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.tools.up import command_socket
from trtllm_disagg.tools.up.command_socket import (
    COMMAND_SOCKET,
    NoUpError,
    connect_to,
    listen_at,
    send_to_up,
    serving_commands,
)
from trtllm_disagg.tools.up.commands import Describe, Scale
from trtllm_disagg.tools.up.plan import Backoff
from trtllm_disagg.tools.up.run_dir import ProcessRecord, RunDir
from trtllm_disagg.tools.up.status import Status
from trtllm_disagg.tools.up.supervisor import Supervisor

#: Sends a command as a user with no rights, and prints the answer.
AS_USER_WITHOUT_RIGHTS = (
    *(sys.executable, "-c"),
    """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.chdir(os.path.dirname(sys.argv[1]))
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.path.basename(sys.argv[1]))
connection.sendall(b'{"command": "scale", "workers": {"prefill": 1}}\\n')
print(connection.makefile().read())
""",
)


async def test_command_that_fails_unexpectedly_answers_the_reason_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Status):
        def note(self, text: str) -> None:
            raise RuntimeError("the terminal is gone")

    run_dir = RunDir.claim(tmp_path / "run")
    supervisor = Supervisor(worker_config(run_dir.path), [], run_dir, Broken())
    try:
        async with serving_commands(supervisor):
            with pytest.raises(DisaggError, match="RuntimeError: the terminal is gone"):
                await tell(supervisor, Set({"max_local_prefill_length": 7}))
    finally:
        await supervisor.kill()
    assert "a command failed unexpectedly" in caplog.text


async def test_a_stop_while_a_command_is_served_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir.claim(tmp_path / "run")
    supervisor = Supervisor(worker_config(run_dir.path), [], run_dir, Status())
    try:
        async with serving_commands(supervisor):
            unfinished = connect_to(run_dir.path / COMMAND_SOCKET)
            await tell(supervisor, Describe())  # after the one before it
        with unfinished:
            assert await asyncio.to_thread(unfinished.recv, 1) == b""
    finally:
        await supervisor.kill()
    assert caplog.messages == []


async def test_on_a_full_disk_workers_come_are_started_again_and_leave(tmp_path: Path) -> None:
    told: list[str] = []
    is_back = asyncio.Event()

    class Told(Status):
        def note(self, text: str) -> None:
            told.append(text)
            if "is back" in text:
                is_back.set()

    class FullDisk(RunDir):
        def write(self, records: Iterable[ProcessRecord]) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    claimed = RunDir.claim(tmp_path / "run")
    config = replace(worker_config(claimed.path), backoff=Backoff(first=0.01))
    supervisor = Supervisor(config, [], FullDisk(claimed.path), Told())
    watching = asyncio.create_task(supervisor.watch())
    try:
        async with serving_commands(supervisor):
            assert (await tell(supervisor, Scale({"prefill": 1})))[0] == {"prefill": 1, "decode": 0}
            os.kill(supervisor.processes[0].pid, signal.SIGKILL)
            await asyncio.wait_for(is_back.wait(), 20)
            assert await supervisor.drain()
    finally:
        watching.cancel()
        await supervisor.kill()
    (warning,) = [line for line in told if "No space left" in line]
    assert "processes.json" in warning


NONSENSE = [b"", b"[]", b"nonsense", b'{"command": "stop"}', b'{"command": "scale"}', b"\xff\xfe"]


@pytest.mark.parametrize("line", [*NONSENSE, b'{"command":' * 5_000, b"{" * 70_000])
async def test_invalid_command_line_is_refused_and_up_continues(supervisor: Supervisor, line: bytes) -> None:
    answer = await asyncio.to_thread(say, supervisor, line + b"\n")
    assert "command" in answer["refused"]
    assert (await tell(supervisor, Describe()))[0]["model"] == "m"


def say(supervisor: Supervisor, text: bytes) -> dict[str, Any]:
    with connect_to(supervisor.config.run_dir / COMMAND_SOCKET, 20) as connection:
        connection.sendall(text)
        with connection.makefile("rb") as stream:
            answer: dict[str, Any] = json.loads(stream.readline())
        return answer


async def test_silent_command_connection_is_refused_and_closed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_socket, "IDLE_SECONDS", 0.2)
    for half in (b"", b'{"command":'):
        assert "no line within 0.2 s" in (await asyncio.to_thread(say, supervisor, half))["refused"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_even_where_the_socket_is_open_to_it(supervisor: Supervisor) -> None:
    path = supervisor.config.run_dir / COMMAND_SOCKET
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)
    supervisor.config.run_dir.chmod(0o711)
    for parent in path.parents[1:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    done = await asyncio.to_thread(
        subprocess.run, [*AS_USER_WITHOUT_RIGHTS, str(path)], capture_output=True, text=True
    )
    assert "from uid 65534; expected uid 0" in json.loads(done.stdout)["refused"], done.stderr
    assert supervisor.processes == []


def test_a_socket_that_a_dead_process_left_is_refused_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / COMMAND_SOCKET
    listen_at(path).close()
    with pytest.raises(ConfigError, match="run directory of a running `up`"):
        send_to_up(tmp_path, Describe())
    with listen_at(path), connect_to(path):
        pass


async def test_a_command_is_executed_when_its_client_has_gone(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    with connect_to(supervisor.config.run_dir / COMMAND_SOCKET) as connection:
        connection.sendall(b'{"command": "scale", "workers": {"prefill": 4}}\n')
    line, _ = await tell(supervisor, Scale({"prefill": 4}))
    assert line == {"prefill": 4, "decode": 0}
    assert (len(supervisor.processes), caplog.messages) == (4, [])


def test_a_command_for_an_up_that_starts_says_when_to_try_again(tmp_path: Path) -> None:
    here = ProcessRecord("decode-0", "decode", os.getpid(), {}, "", "starting", birth(os.getpid()))
    RunDir(tmp_path).write([here])
    with pytest.raises(NoUpError, match=r"takes no commands now: it starts, .* after its line `ready`"):
        send_to_up(tmp_path, Describe())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"done": {"strat', "ended before this was done"),
        *(
            (line, "does not answer as one of version")
            for line in (
                b"hello\n",
                b"\xff\xfe\n",
                b"[]\n",
                b'{"said": "a", "done": "b"}\n',
                b'{"said": 5}\n',
                b'{"done": null}\n',
                b'{"done": {"strategy": "auto"}}\n',
                b"[" * 100_000 + b"\n",
            )
        ),
    ],
)
def test_answer_that_no_up_of_this_version_gives_is_an_error(
    tmp_path: Path, answer: bytes, said: str
) -> None:
    with listen_at(tmp_path / COMMAND_SOCKET) as listener, ThreadPoolExecutor() as other:
        listener.settimeout(20)

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        replied = other.submit(reply)
        with pytest.raises(DisaggError, match=said):
            send_to_up(tmp_path, Describe(), deadline=20)
        replied.result()
