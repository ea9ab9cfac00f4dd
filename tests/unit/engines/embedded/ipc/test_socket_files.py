"""Socket files between processes of one user: no other user, and no file that stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from trtllm_disagg.engines.embedded.ipc.sockets import VARIABLE, Listener, accept, connect, directory
from trtllm_disagg.errors import ConfigError

#: As another user: connects, and says what it hears.
INTRUDER = """
import os, socket, sys
os.setuid(65534)
intruder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
intruder.connect(sys.argv[1])
print(intruder.recv(1))
"""

#: Listens, says so, and waits to be killed.
LISTENS = """
import sys
from trtllm_disagg.engines.embedded.ipc.sockets import Listener
with Listener("kv") as listener:
    print(listener.path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of this test's own; pytest's paths are too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        monkeypatch.setenv(VARIABLE, f"{parent}/sockets")
        yield Path(parent, "sockets")


def listening_process() -> subprocess.Popen[bytes]:
    """Returns when it listens."""
    process = subprocess.Popen([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert Path(process.stdout.readline().decode().strip()).is_socket()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_local_socket_transfers_bytes_and_its_file_goes_with_it(where: Path) -> None:
    address = (listener := Listener("core")).path
    with listener, connect(address) as here, accept(listener) as there:
        here.sendall(b"x")
        assert there.recv(1) == b"x"
    assert list(where.iterdir()) == []
    listener.close()


def test_the_files_of_killed_processes_go_at_the_next_start_and_do_not_pile_up(where: Path) -> None:
    with Listener("kv") as mine:
        counts = []
        for _ in range(3):
            process = listening_process()
            counts.append(len(list(where.iterdir())))
            end(process)
        assert counts == [4, 4, 4], "two of this process, two of the one that is alive"
        Listener("kv").close()
        assert sorted(where.iterdir()) == [Path(mine.path), Path(f"{mine.path}.lock")]
        connect(mine.path).close()


def test_the_file_of_a_stopped_process_stays() -> None:
    process = listening_process()
    try:
        process.send_signal(signal.SIGSTOP)
        before = sorted(directory().iterdir())
        Listener("kv").close()
        assert sorted(directory().iterdir()) == before
    finally:
        end(process)


def test_processes_that_start_together_keep_their_sockets() -> None:
    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        listeners = [stack.enter_context(made) for made in pool.map(lambda _: Listener("kv"), range(40))]
        for listener in listeners:
            connect(listener.path).close()


def test_directory_is_made_for_this_user_only(where: Path) -> None:
    assert directory() == where
    assert where.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_directory_that_others_may_enter_is_refused(where: Path, mode: int) -> None:
    where.mkdir()
    where.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{VARIABLE}: '{where}'.*with mode 0700"):
        Listener("kv")


def test_directory_that_is_a_link_a_file_or_another_users_is_refused(where: Path) -> None:
    private = where.with_name("private")
    private.mkdir(mode=0o700)
    where.symlink_to(private)
    with pytest.raises(ConfigError, match=rf"{VARIABLE}.*it is l"):
        directory()
    where.unlink()
    where.touch(mode=0o600)
    with pytest.raises(ConfigError, match=VARIABLE):
        directory()
    where.unlink()
    if os.geteuid() == 0:
        where.mkdir(mode=0o700)
        os.chown(where, 65534, 65534)
        with pytest.raises(ConfigError, match=rf"{VARIABLE}.*of uid 65534"):
            directory()


@pytest.mark.parametrize("path", ["relative", "/tmp/" + "x" * 60, "/tmp/a b", "/nowhere/sockets"])
def test_directory_that_no_socket_can_be_in_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, path)
    with pytest.raises(ConfigError, match=rf"{VARIABLE}: '{path}'.*absolute path"):
        directory()


def test_an_address_without_a_listener_is_refused() -> None:
    address = (listener := Listener("core")).path
    listener.close()
    with pytest.raises(FileNotFoundError):
        connect(address)


def fill(stack: ExitStack, address: str) -> None:
    """The backlog of the listener, until `stack` ends."""
    while True:
        filler = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        filler.setblocking(False)
        try:
            filler.connect(address)
        except BlockingIOError:
            return


def test_a_connection_waits_for_room_in_a_full_backlog() -> None:
    address = (listener := Listener("core")).path
    with ExitStack() as stack:
        stack.enter_context(listener)
        fill(stack, address)
        with pytest.raises(TimeoutError):
            connect(address, 0.01)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        waiting = pool.submit(connect, address, 20)
        listener.accept()[0].close()
        connection = stack.enter_context(waiting.result(20))
        assert connection.gettimeout() == 20


def test_a_signal_while_a_connection_waits_is_no_answer() -> None:
    """Python would take the interrupted call for a connection to a process of another user."""
    address = (listener := Listener("core")).path
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    try:
        with ExitStack() as stack:
            stack.enter_context(listener)
            fill(stack, address)
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with pytest.raises(TimeoutError):
                connect(address, 0.5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_accept_keeps_the_listener_s_time_limit() -> None:
    listener = Listener("core")
    with listener:
        listener.settimeout(0.01)
        with pytest.raises(TimeoutError):
            accept(listener)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_connection_of_another_user_is_closed_and_the_next_one_accepted(where: Path) -> None:
    """Even where the directory is open."""
    address = (listener := Listener("core")).path
    for each, mode in ((where.parent, 0o711), (where, 0o711), (address, 0o777)):
        os.chmod(each, mode)
    with listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(20)
        accepted = pool.submit(accept, listener)
        intruder = subprocess.run(
            [sys.executable, "-S", "-c", INTRUDER, address], stdout=subprocess.PIPE, check=True, timeout=20
        )
        assert intruder.stdout.strip() == b"b''"
        assert not accepted.done()

        where.chmod(0o700)
        with connect(address) as here, accepted.result() as there:
            here.sendall(b"x")
            assert there.recv(1) == b"x"
