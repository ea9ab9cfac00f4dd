"""KV between modelled engines: what a transfer takes, what waits for it, and that every block comes back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from tests.support.meeting import Duo
from tests.support.modelled_cores import ModelledTestCore, VirtualClock, prompt_of
from trtllm_disagg.engines.embedded.ipc.messages import ReceivedHandoff
from trtllm_disagg.engines.embedded.kv_transfer.base import (
    BlockPairs,
    KvLayout,
    PeerMetadata,
    ReadTimeoutError,
)
from trtllm_disagg.engines.modelled.core import LinkCost, LinkTransport, ScaledClock
from trtllm_disagg.errors import HandoffRefusedError, KvTransferError

LAYOUT = KvLayout("m", 1, 32, 1, 1, "auto")
#: 1 s a block, half a second of latency.
COST = LinkCost(1.0, 0.5, 1.0)
BLOCK_BYTES = 100


def first(count: int) -> BlockPairs:
    return BlockPairs.of(range(count), range(count))


class End:
    """One engine's links."""

    def __init__(self, name: str, clock: VirtualClock, cost: LinkCost = COST) -> None:
        self.transport = LinkTransport(cost, BLOCK_BYTES, clock)
        self.card = PeerMetadata(name, self.transport.name, LAYOUT, 100, self.transport.serve(name))
        self._clock = clock

    def seconds_to_read(self, peer: End, count: int, *, at: float) -> float:
        """When so many blocks of a peer are here, asked for at this time, which may be an earlier one."""
        self._clock.time = at
        assert self.transport.read(peer.card, first(count), 1e6) == count * BLOCK_BYTES
        return self._clock.time


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def ends(clock: VirtualClock) -> Iterator[list[End]]:
    made = [End(f"engine-{i}", clock) for i in range(4)]
    yield made
    for end in made:
        end.transport.close()


@pytest.mark.parametrize(
    ("reader", "peer", "count", "at", "end"),
    [(0, 2, 2, 11.0, 16.5), (2, 1, 2, 11.0, 16.5), (2, 3, 4, 10.0, 14.5), (1, 0, 4, 10.0, 14.5)],
    ids=["into one engine", "out of one engine", "over other links", "in the other direction"],
)
def test_a_transfer_takes_its_bytes_over_the_bandwidth_and_a_latency_behind_those_of_its_links(
    ends: list[End], reader: int, peer: int, count: int, at: float, end: float
) -> None:
    assert ends[0].seconds_to_read(ends[1], 4, at=10.0) == 14.5
    assert ends[reader].seconds_to_read(ends[peer], count, at=at) == end


def test_a_write_takes_the_same_links_as_a_read_from_there(ends: list[End], clock: VirtualClock) -> None:
    clock.time = 10.0
    assert ends[0].transport.write(ends[1].card, first(4), 1e6) == 400
    assert clock.time == 14.5
    assert ends[2].seconds_to_read(ends[0], 1, at=10.0) == 15.5
    assert ends[1].seconds_to_read(ends[3], 1, at=10.0) == 15.5


def test_transfer_takes_the_bandwidth_of_the_slower_end(clock: VirtualClock, ends: list[End]) -> None:
    slow = End("slow", clock, LinkCost(3.0, 0.0, 1.0))
    assert slow.seconds_to_read(ends[0], 2, at=10.0) == 16.5
    slow.transport.close()


def test_a_transfer_that_the_timeout_does_not_allow_fails_when_it_is_over(
    clock: VirtualClock, ends: list[End]
) -> None:
    with pytest.raises(ReadTimeoutError, match=r"need 9\.5 s for 9 blocks; .* allows 3 s") as raised:
        ends[0].transport.read(ends[1].card, first(9), 3.0)
    assert clock.time == 103.0
    assert not raised.value.may_land_later


def test_transfer_from_a_closed_peer_raises_with_its_name(clock: VirtualClock, ends: list[End]) -> None:
    gone = End("gone", clock)
    gone.transport.close()
    with pytest.raises(KvTransferError, match="gone is gone"):
        ends[0].seconds_to_read(gone, 1, at=1.0)


def test_a_peer_that_has_another_file_in_its_links_place_is_an_error_and_the_file_stays_as_it_is(
    clock: VirtualClock, ends: list[End], tmp_path: Path
) -> None:
    gone = End("gone", clock)
    before = {int(name) for name in os.listdir("/proc/self/fd")}
    gone.transport.close()
    kept = tmp_path / "kept"
    kept.write_bytes(bytes(range(64)))
    freed = [number for number in before if not os.path.exists(f"/proc/self/fd/{number}")]
    with ExitStack() as files:
        # The kernel gives the lowest free number.
        while any(not os.path.exists(f"/proc/self/fd/{number}") for number in freed):
            files.enter_context(kept.open("r+b"))
        with pytest.raises(KvTransferError, match=r"gone is gone: .* is no link"):
            ends[0].seconds_to_read(gone, 1, at=1.0)
    assert kept.read_bytes() == bytes(range(64))


def test_a_peer_with_another_time_scale_is_refused(clock: VirtualClock, ends: list[End]) -> None:
    slow = End("slow", clock, LinkCost(1.0, 0.5, 8.0))
    with pytest.raises(HandoffRefusedError, match=r"time_scale is 1 here and 8 at slow"):
        ends[0].seconds_to_read(slow, 1, at=1.0)
    slow.transport.close()


def test_transfers_in_both_directions_at_once_do_not_wait_for_each_other(ends: list[End]) -> None:
    one, two = ends[:2]

    def write(pair: tuple[End, End]) -> None:
        for _ in range(200):
            pair[0].transport.write(pair[1].card, first(1), 1e6)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, [(one, two), (two, one)], timeout=60))


# -- engines


@pytest.fixture
def duo() -> Iterator[Duo]:
    clock = ScaledClock(1.0)
    pair = Duo(ModelledTestCore(clock, max_num_tokens=128), ModelledTestCore(clock))
    yield pair
    pair.close()


def test_a_slow_link_makes_decode_wait_and_prefill_go_on() -> None:
    clock = ScaledClock(1.0)
    slow = {"link_gb_per_second": 1e-3}  # 1 MB/s: 32 ms a block
    duo = Duo(ModelledTestCore(clock, slow), ModelledTestCore(clock, slow))
    handoff = duo.prefill.prefill(prompt_of(320))
    begun = clock.now()
    request = duo.decode.add_decode(prompt_of(320), handoff, 2)
    duo.decode.step()
    duo.prefill.generate(prompt_of(64, salt=5), 2)
    assert not duo.decode.answers[request, 0].tokens
    duo.decode.run(request)
    assert clock.now() - begun >= 0.32
    duo.assert_idle()
    duo.close()


def test_what_decode_hands_back_takes_the_time_of_its_link_and_the_rest_is_computed() -> None:
    clock, tokens = ScaledClock(1.0), prompt_of(330)
    slow = {"link_gb_per_second": 1e-3}
    duo = Duo(ModelledTestCore(clock, slow), ModelledTestCore(clock, slow))
    duo.decode.generate(tokens[:320], 1)
    handoff = duo.decode.run(duo.decode.add(tokens[:321], 1, request_type="context_only")).handoff
    assert handoff is not None
    begun, received = clock.now(), ReceivedHandoff(handoff.opaque_state, handoff.first_gen_tokens)
    duo.prefill.run(duo.prefill.add(tokens[:321], 1, request_type="generation_only", handoff=received))
    assert clock.now() - begun >= 0.32
    answer = duo.prefill.run(duo.prefill.add(tokens, 1))
    assert (answer.tokens, answer.cached_tokens) == (ModelledTestCore().generate(tokens, 1), 320)
    duo.assert_idle()
    duo.close()


def test_the_links_of_a_process_that_was_replaced_are_not_touched(ends: list[End]) -> None:
    address = msgspec.msgpack.decode(ends[1].card.address)
    address["process"]["started"] -= 1
    ends[1].card = msgspec.structs.replace(ends[1].card, address=msgspec.msgpack.encode(address))
    with pytest.raises(KvTransferError, match=r"engine-1 is gone \(pid \d+\)"):
        ends[0].seconds_to_read(ends[1], 4, at=10.0)
