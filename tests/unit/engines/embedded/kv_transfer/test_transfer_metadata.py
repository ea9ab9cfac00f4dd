"""What travels between two engines besides KV: its metadata once, then ids; and few descriptors for many blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from nixl_cu13._api import nixl_agent

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.meeting import Duo
from tests.unit.engines.embedded.core.test_core_handoff import prompt
from trtllm_disagg.engines.embedded.kv_transfer.base import common_runs
from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport
from trtllm_disagg.engines.recording.fake_transport import FakeTransport

BLOCK = 32


@dataclass
class Engines(Duo):
    prefill_transport: FakeTransport = field(default_factory=FakeTransport)
    decode_transport: FakeTransport = field(default_factory=FakeTransport)


@pytest.fixture(scope="module")
def duo(checkpoints: Checkpoints) -> Iterator[Engines]:
    prefill, decode = (FakeTransport(inner=create_transport("NIXL")) for _ in range(2))
    first, second = (
        Core(checkpoints(), cache_transceiver_config={"backend": "NIXL"}, transport=each)
        for each in (prefill, decode)
    )
    duo = Engines(first, second, prefill_transport=prefill, decode_transport=decode)
    yield duo
    duo.close()


def pull(duo: Duo, tokens: list[int], max_tokens: int = 1) -> None:
    handoff = duo.prefill.prefill(tokens)
    answer = duo.decode.run(duo.decode.add_decode(tokens, handoff, max_tokens))
    assert answer.error is None, answer.error


def test_a_hundred_requests_load_metadata_once_each_way(
    duo: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents: list[bytes] = []
    add = nixl_agent.add_remote_agent

    def add_and_count(agent: Any, metadata: bytes) -> Any:
        agents.append(metadata)
        return add(agent, metadata)

    monkeypatch.setattr(nixl_agent, "add_remote_agent", add_and_count)
    for i in range(50):
        pull(duo, prompt(9, salt=i))
    assert duo.decode.connector.peers.metadata.loads == 1
    for i in range(50):
        duo.generate(prompt(9, salt=50 + i), 1)
    assert duo.decode.connector.peers.metadata.loads == 1, "the same serve both styles"
    assert duo.prefill.connector.peers.metadata.loads == 1
    assert len(agents) == 2, "one on each side"


@pytest.mark.parametrize("style", ["pull", "push"])
def test_neighbouring_blocks_are_moved_as_one_piece(duo: Engines, style: str) -> None:
    """After some coming and going, so that the pools are not in their first order."""
    mover = duo.decode_transport if style == "pull" else duo.prefill_transport
    before = len(mover.transfers)
    for i in range(12):
        tokens = prompt(BLOCK * (3 + i % 4) + 5, salt=200 + i + 50 * len(style))
        if style == "pull":
            pull(duo, tokens, 3)
        else:
            duo.generate(tokens, 3)
    moved = [transfer for transfer in mover.transfers[before:] if transfer.kind != "forget"]
    blocks = sum(len(transfer.remote) for transfer in moved)
    pieces = sum(len(common_runs(np.asarray(t.remote), np.asarray(t.local))) for t in moved)
    assert blocks >= 12 * 4
    assert pieces < blocks
