"""Ports that a deployment picks are its own: no other picks them, in this process or another one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from trtllm_disagg.tools.up.plan import LOOPBACK, PortInUseError
from trtllm_disagg.tools.up.ports import OwnPorts, free_http_port, free_system_ports, own_directory

#: Two blocks, that no deployment picks.
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
    own.take(len(AMONG) // 2 + 1, LOOPBACK)  # of both blocks
    program = f"from trtllm_disagg.tools.up.ports import OwnPorts\nOwnPorts({AMONG!r}).take(1, {LOOPBACK!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith(
        "PortInUseError: 1 free ports are needed in range(18000, 18064), 0 were found"
    )


def test_the_ports_of_an_owner_that_is_gone_are_picked_again(own: OwnPorts) -> None:
    with closing(OwnPorts(AMONG)) as other:
        other.take(len(AMONG) // 2 + 1, LOOPBACK)
        with pytest.raises(PortInUseError):
            own.take(1, LOOPBACK)
    with closing(OwnPorts(AMONG)) as later:
        assert later.take(1, LOOPBACK)


def test_a_port_that_another_program_listens_on_is_passed_over(own: OwnPorts) -> None:
    with closing(socket.create_server((LOOPBACK, AMONG[0]))):
        assert AMONG[0] not in own.take(len(AMONG) - 1, LOOPBACK)


def test_locks_are_in_a_directory_that_only_this_user_may_enter(own: OwnPorts) -> None:
    own.take(1, LOOPBACK)
    directory = own_directory()
    assert directory is not None
    assert (directory.stat().st_uid, directory.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    assert any(directory.glob("ports-180*"))


@pytest.mark.parametrize("taken_as", ["open to others", "link", "of another user", "file"])
def test_another_user_who_takes_the_name_of_the_directory_holds_no_port(
    taken_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtllm_disagg.tools.up.ports._TEMPORARY", tmp_path)
    path = tmp_path / f"trtllm-disagg-{os.geteuid()}"
    if taken_as == "file":
        path.touch()
    elif taken_as == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir(mode=0o777 if taken_as == "open to others" else 0o700)
        path.chmod(0o777 if taken_as == "open to others" else 0o700)
    if taken_as == "of another user":
        path.rename(tmp_path / f"trtllm-disagg-{os.geteuid() + 1}")
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
    assert own_directory() is None
    with closing(OwnPorts(AMONG)) as ports:
        assert len(ports.take(len(AMONG), LOOPBACK)) == len(AMONG)


def test_any_http_port_is_one_of_its_own() -> None:
    assert free_http_port(LOOPBACK, 0) not in free_system_ports(4)


def test_a_host_that_is_not_of_this_machine_is_refused_by_name() -> None:
    with pytest.raises(PortInUseError, match=r"a port on 192\.0\.2\.1 that can be listened on"):
        free_http_port("192.0.2.1", 0)
