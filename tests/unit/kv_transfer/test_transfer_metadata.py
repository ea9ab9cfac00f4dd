"""What travels between two engines besides KV: a card once, then ids; and few descriptors for many blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.meeting import Duo
from tests.unit.embedded.core.test_core_handoff import prompt
from trtllm_disagg.kv_transfer.shared_memory import _common_runs

BLOCK = 32


@pytest.fixture(scope="module")
def duo(checkpoints: Checkpoints) -> Iterator[Duo]:
    def core() -> Core:
        return Core(checkpoints(), cache_transceiver_config={"backend": "NIXL"})

    duo = Duo(core(), core())
    yield duo
    duo.close()


def pull(duo: Duo, tokens: list[int], max_tokens: int = 1) -> None:
    handoff = duo.prefill.prefill(tokens)
    answer = duo.decode.run(duo.decode.add_decode(tokens, handoff, max_tokens))
    assert answer.error is None, answer.error


def counted(add: Callable[[bytes], Any], into: list[bytes]) -> Callable[[bytes], Any]:
    def add_and_count(metadata: bytes) -> Any:
        into.append(metadata)
        return add(metadata)

    return add_and_count


def test_a_hundred_requests_load_one_card_each_way(duo: Duo, monkeypatch: pytest.MonkeyPatch) -> None:
    agents: list[bytes] = []
    for core in (duo.prefill, duo.decode):
        agent: Any = core.transfers._transport._transport._agent  # type: ignore[attr-defined]
        monkeypatch.setattr(agent, "add_remote_agent", counted(agent.add_remote_agent, agents))
    for i in range(50):
        pull(duo, prompt(9, salt=i))
    assert duo.decode.transfers._receiver.cards.loads == 1
    for i in range(50):
        duo.generate(prompt(9, salt=50 + i), 1)
    assert duo.decode.transfers._receiver.cards.loads == 1, "the same card serves both styles"
    assert duo.prefill.transfers._pusher.cards.loads == 1
    assert len(agents) == 2, "one on each side"


@pytest.mark.parametrize("style", ["pull", "push"])
def test_a_request_moves_fewer_pieces_than_blocks(
    duo: Duo, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some coming and going, so that the pools are not in their first order."""
    moved: list[tuple[int, int]] = []
    mover = duo.decode if style == "pull" else duo.prefill
    name = "read" if style == "pull" else "write"
    move = getattr(mover.transfers._transport, name)

    def count(peer: Any, remote: np.ndarray, local: np.ndarray, timeout: float) -> int:
        moved.append((len(remote), len(_common_runs(remote, local))))
        return int(move(peer, remote, local, timeout))

    monkeypatch.setattr(mover.transfers._transport, name, count)
    for i in range(12):
        tokens = prompt(BLOCK * (3 + i % 4) + 5, salt=200 + i + 50 * len(style + name))
        if style == "pull":
            pull(duo, tokens, 3)
        else:
            duo.generate(tokens, 3)
    blocks, pieces = (sum(each) for each in zip(*moved, strict=True))
    assert blocks >= 12 * 4
    assert pieces < blocks
