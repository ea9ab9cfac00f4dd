"""KV between two hosts, over UCX tcp: right answers, and what a stalled or a dead peer costs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.hosts import ADDRESSES, Host, two_hosts, why_not, write_key
from tests.unit.test_core_handoff import prompt

SECONDS = 1.5
Hosts = tuple[Host, Host]


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as names:
        yield names


@pytest.fixture
def start(
    namespaces: tuple[str, str], checkpoints: Checkpoints, tmp_path: Path
) -> Iterator[Callable[[int], Host]]:
    key = write_key(tmp_path)
    started: list[Host] = []

    def start_on(host: int) -> Host:
        started.append(Host(namespaces[host], ADDRESSES[host], checkpoints(), SECONDS, key))
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


def test_both_styles_give_the_tokens_of_one_and_survive_their_peers(start: Callable[[int], Host]) -> None:
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
    assert late["quarantined"] == 3, late
    assert decode.ask("agg", prompt=prompt(50, salt=8))["error"] is None, "others go on"

    # A sender that is dead: a clean error.
    prefill.signal(signal.SIGKILL)
    dead = decode.ask("expect", prompt=tokens, request=4, endpoint=prefill.endpoint)
    assert dead["error"] is not None
    assert decode.ask("agg", prompt=prompt(50, salt=9))["error"] is None, "others go on"
