"""Events go from every process of a deployment to every other one, and to no port."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from trtllm_disagg.tools.up.brokers import EventBroker, broker_env


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EventBroker]:
    made = EventBroker(tmp_path)
    made.start()
    yield made
    made.close()


def addresses(run_dir: Path) -> tuple[str, str]:
    into, out_of = broker_env(run_dir)["DYN_ZMQ_BROKER_URL"].split(" , ")
    return into.removeprefix("xsub="), out_of.removeprefix("xpub=")


def test_event_broker_delivers_published_events(broker: EventBroker, tmp_path: Path) -> None:
    into, out_of = addresses(tmp_path)
    with zmq.Context() as context, context.socket(zmq.SUB) as reader, context.socket(zmq.XPUB) as writer:
        reader.linger = writer.linger = 0
        reader.rcvtimeo = writer.rcvtimeo = 10_000
        reader.connect(out_of)
        writer.connect(into)
        reader.subscribe(b"kv")
        assert writer.recv() == b"\x01kv", "the subscription came through"
        writer.send_multipart([b"kv", b"event"])
        assert reader.recv_multipart() == [b"kv", b"event"]


def listening() -> set[Any]:
    return {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_only_the_owner_can_connect_and_no_port_is_opened(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before = listening()  # of other tests in this process
    request.getfixturevalue("broker")
    for address in addresses(tmp_path):
        file = Path(address.removeprefix("ipc://"))
        assert stat.S_ISSOCK(file.stat().st_mode)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert listening() <= before


def test_closing_leaves_nothing_and_may_come_before_starting(tmp_path: Path) -> None:
    never = EventBroker(tmp_path)
    never.close()
    (tmp_path / "events-in").touch()
    broker = EventBroker(tmp_path)
    broker.start()
    broker.close()
    broker.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 120, "a,b", "a b"])
def test_a_directory_that_a_socket_cannot_be_in_has_no_broker(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    assert broker_env(directory) == {}
    broker = EventBroker(directory)
    broker.start()
    broker.close()
