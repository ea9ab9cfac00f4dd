"""KV between two hosts: right answers, and what a stalled or a dead peer, or one without the key, costs."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.support.attacks import EVERY_DOOR
from tests.support.hosts import ADDRESSES, Host, two_hosts, why_not, write_key
from tests.support.strangers import as_stranger, require
from tests.unit.engines.embedded.core.test_core_handoff import prompt

#: Of a lease and of every transfer: what a stall costs, and far more than one takes on a busy machine.
SECONDS = 4.0
Hosts = tuple[Host, Host]


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as names:
        yield names


@pytest.fixture(params=["TLS", "NIXL"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(
    namespaces: tuple[str, str], checkpoints: Checkpoints, tmp_path: Path, backend: str
) -> Iterator[Callable[[int], Host]]:
    key = write_key(tmp_path)
    started: list[Host] = []

    def start_on(host: int) -> Host:
        started.append(Host(namespaces[host], ADDRESSES[host], checkpoints(), SECONDS, key, backend))
        return started[-1]

    yield start_on
    for host in started:
        host.close()


def generate(prefill: Host, decode: Host, tokens: list[int]) -> list[int]:
    handoff = prefill.ask("prefill", prompt=tokens)
    answer = decode.ask("decode", prompt=tokens, **handoff)
    assert answer["error"] is None, answer
    return list(answer["tokens"])


def push(prefill: Host, decode: Host, tokens: list[int], request: int) -> list[int]:
    prefill.start("push", prompt=tokens, request=request)
    answer = decode.ask("expect", prompt=tokens, request=request, endpoint=prefill.endpoint)
    assert answer["error"] is None, answer
    assert prefill.wait()["error"] is None
    return list(answer["tokens"])


def test_handoffs_between_hosts_give_agg_tokens_and_survive_lost_peers(
    start: Callable[[int], Host], backend: str
) -> None:
    prefill, decode = start(0), start(1)
    assert prefill.endpoint.startswith(f"tcp://{ADDRESSES[0]}:")
    pulled, pushed = prompt(200, salt=1), prompt(200, salt=2)
    right = [decode.ask("agg", prompt=tokens)["tokens"] for tokens in (prompt(200, salt=3),)]
    assert generate(prefill, decode, pulled) == prefill.ask("agg", prompt=pulled)["tokens"]
    assert push(prefill, decode, pushed, 1) == prefill.ask("agg", prompt=pushed)["tokens"]
    assert right == [generate(prefill, decode, prompt(200, salt=3))]

    # A writer that stalls: decode gives up at its deadline, and keeps the blocks that it offered.
    prefill.signal(signal.SIGSTOP)
    stalled = decode.ask("expect", prompt=prompt(90, salt=4), request=2, endpoint=prefill.endpoint)
    assert stalled["error"] is not None
    assert decode.ask("agg", prompt=prompt(50, salt=5))["error"] is None, "others go on"
    prefill.signal(signal.SIGCONT)
    assert decode.ask("settle")["quarantined"] == 0, "it has said that it stopped"
    tokens = prompt(70, salt=6)
    assert push(prefill, decode, tokens, 3) == prefill.ask("agg", prompt=tokens)["tokens"]

    # A sender that stalls while it is read: the blocks that the read may still fill are not used again.
    tokens = prompt(90, salt=7)
    handoff = prefill.ask("prefill", prompt=tokens)
    late = decode.ask("decode", prompt=tokens, stop=prefill.pid, **handoff)
    assert "took longer" in late["error"]
    assert late["quarantined"] == (3 if backend == "NIXL" else 0), "a read by TLS lands never"
    assert decode.ask("agg", prompt=prompt(50, salt=8))["error"] is None, "others go on"

    # A sender that is dead: a clean error.
    prefill.signal(signal.SIGKILL)
    dead = decode.ask("expect", prompt=tokens, request=4, endpoint=prefill.endpoint)
    assert dead["error"] is not None
    assert decode.ask("agg", prompt=prompt(50, salt=9))["error"] is None, "others go on"


@pytest.mark.parametrize("backend", ["TLS"])
def test_another_host_without_the_key_gets_nothing(
    start: Callable[[int], Host],
    namespaces: tuple[str, str],
    checkpoints: Checkpoints,
    tmp_path: Path,
    backend: str,
) -> None:
    require()
    prefill, decode = start(0), start(1)
    tokens = prompt(90, salt=1)
    handoff = prefill.ask("prefill", prompt=tokens)
    ports = listening(prefill.pid)
    assert len(ports) == 2, "control and data"

    aim = {"tcp": ports, "stream": [], "datagram": [], "pids": [], "shm": [], "address": 0}
    result = as_stranger(EVERY_DOOR, json.dumps(aim), namespace=namespaces[1])
    heard = bytes.fromhex(result["heard"])
    assert b"layout" not in heard
    assert len(heard) < 64 * 22, "TLS alerts"

    # Not even with a real handoff, from an engine with another key.
    spy = Host(
        namespaces[1], ADDRESSES[1], checkpoints(), SECONDS, write_key(tmp_path, b"other" * 8), backend
    )
    try:
        refused = spy.ask("decode", prompt=tokens, **handoff)
        assert "does not have the key" in refused["error"]
        assert refused["tokens"] == []
    finally:
        spy.close()
    tokens = prompt(90, salt=2)
    assert generate(prefill, decode, tokens) == prefill.ask("agg", prompt=tokens)["tokens"]


def listening(pid: int) -> list[tuple[str, int]]:
    """On the network that this process is on; the kernel writes addresses as little-endian hexadecimal numbers."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in places]
