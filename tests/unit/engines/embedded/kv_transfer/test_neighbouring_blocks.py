"""Blocks that lie side by side are moved as one piece: few descriptors for many blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.fake_transport import FakeTransport
from tests.support.meeting import Duo
from tests.unit.engines.embedded.core.test_core_handoff import prompt
from trtllm_disagg.engines.embedded.kv_transfer.base import common_runs
from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport

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
