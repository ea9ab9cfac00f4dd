"""Sockets between processes of one user: no file, and no other user."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from trtllm_disagg.engines.embedded.ipc.sockets import accept, listen
from trtllm_disagg.processes.same_user import connect

#: As another user: connects, and says what it hears.
INTRUDER = """
import os, socket, sys
os.setuid(65534)
intruder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
intruder.connect("\\0" + sys.argv[1])
print(intruder.recv(1))
"""


def test_local_socket_transfers_bytes_without_a_file() -> None:
    listener, address = listen()
    with listener, connect(address) as here, accept(listener) as there:
        here.sendall(b"x")
        assert there.recv(1) == b"x"
        assert not os.path.exists(address)


def test_an_address_without_a_listener_is_refused() -> None:
    listener, address = listen()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect(address)


def fill(stack: ExitStack, address: str) -> None:
    """The backlog of the listener, until `stack` ends."""
    while True:
        filler = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        filler.setblocking(False)
        try:
            filler.connect(f"\0{address}")
        except BlockingIOError:
            return


def test_a_connection_waits_for_room_in_a_full_backlog() -> None:
    """Any user of the host can fill it."""
    listener, address = listen()
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
    listener, address = listen()
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
    listener, _ = listen()
    with listener:
        listener.settimeout(0.01)
        with pytest.raises(TimeoutError):
            accept(listener)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_connection_of_another_user_is_closed_and_the_next_one_accepted() -> None:
    listener, address = listen()
    with listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(20)
        accepted = pool.submit(accept, listener)
        intruder = subprocess.run(
            [sys.executable, "-S", "-c", INTRUDER, address], stdout=subprocess.PIPE, check=True, timeout=20
        )
        assert intruder.stdout.strip() == b"b''"
        assert not accepted.done()

        with connect(address) as here, accepted.result() as there:
            here.sendall(b"x")
            assert there.recv(1) == b"x"
