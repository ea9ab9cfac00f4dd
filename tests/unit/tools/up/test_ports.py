"""Ports that a deployment picks are its own: no other picks them, in this process or another one."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from trtllm_disagg.tools.up.plan import LOOPBACK, PortInUseError
from trtllm_disagg.tools.up.ports import OwnPorts, free_http_port, free_system_ports

#: That no deployment picks.
AMONG = range(18_000, 18_064)


@pytest.fixture
def own() -> Iterator[OwnPorts]:
    with closing(OwnPorts(AMONG)) as ports:
        yield ports


def test_two_owners_pick_different_ports_though_nothing_listens_yet(own: OwnPorts) -> None:
    with closing(OwnPorts(AMONG)) as other:
        mine, theirs = own.take(8, LOOPBACK), other.take(8, LOOPBACK)
    assert len({*mine, *theirs}) == 16


def test_owner_gets_each_port_once(own: OwnPorts) -> None:
    assert len({*own.take(8, LOOPBACK), *own.take(8, LOOPBACK)}) == 16


def test_ports_of_an_owner_are_not_given_to_another_process(own: OwnPorts) -> None:
    own.take(len(AMONG), LOOPBACK)
    program = f"from trtllm_disagg.tools.up.ports import OwnPorts\nOwnPorts({AMONG!r}).take(1, {LOOPBACK!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith("PortInUseError: found 0 free ports in range(18000, 18064), need 1")


def test_the_ports_of_an_owner_that_is_gone_are_picked_again(own: OwnPorts) -> None:
    with closing(OwnPorts(AMONG)) as other:
        other.take(len(AMONG), LOOPBACK)
        with pytest.raises(PortInUseError):
            own.take(1, LOOPBACK)
    with closing(OwnPorts(AMONG)) as later:
        assert later.take(1, LOOPBACK)


def test_a_port_that_another_program_listens_on_is_passed_over(own: OwnPorts) -> None:
    with closing(socket.create_server((LOOPBACK, AMONG[0]))):
        assert AMONG[0] not in own.take(len(AMONG) - 1, LOOPBACK)


def test_a_server_can_listen_on_a_port_of_an_owner(own: OwnPorts) -> None:
    for port in own.take(len(AMONG), LOOPBACK):
        socket.create_server((LOOPBACK, port)).close()


def test_any_http_port_is_one_of_its_own() -> None:
    assert free_http_port(LOOPBACK, 0) not in free_system_ports(4)


def test_a_host_that_is_not_of_this_machine_is_refused_by_name() -> None:
    with pytest.raises(PortInUseError, match=r"a port on 192\.0\.2\.1 that can be listened on"):
        free_http_port("192.0.2.1", 0)
