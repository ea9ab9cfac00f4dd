"""Rank 0 and one other rank, joined by sockets: what either says, and what rank 0 makes of its end."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from tests.support.fake_transport import Fails, FakeTransport, TakesTooLong
from tests.support.meeting import wait_until
from tests.unit.engines.embedded.tensor_parallel.test_sharding import ThreadCommunicator
from trtllm_disagg.engines.embedded.ipc.messages import AddRequest, SamplingSpec
from trtllm_disagg.engines.embedded.ipc.sockets import Listener
from trtllm_disagg.engines.embedded.kv_cache.memory import CopyStart
from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.kv_transfer.base import (
    BlockPairs,
    KvLayout,
    PeerMetadata,
    ReadTimeoutError,
)
from trtllm_disagg.engines.embedded.model.forward import ModelRunner
from trtllm_disagg.engines.embedded.model.rows import ForwardRow
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence
from trtllm_disagg.engines.embedded.tensor_parallel.group import (
    Broken,
    Built,
    Channel,
    OtherRank,
    RankCommand,
    RankGroup,
    RankLostError,
    Step,
    Stop,
    accept,
    connect,
)
from trtllm_disagg.engines.embedded.tensor_parallel.team import Team
from trtllm_disagg.engines.embedded.tensor_parallel.transfers import (
    Done,
    Read,
    Serve,
    Shard,
    TeamTransport,
    TransferService,
    join_addresses,
)
from trtllm_disagg.errors import ConfigError

_commands = msgspec.msgpack.Decoder(RankCommand)
_SECONDS = 10


@dataclass
class Pair:
    team: Team
    #: Rank 0, as the other rank sees it.
    leader: OtherRank
    #: Why the engine cannot go on.
    lost: queue.Queue[str]

    def end_of_other(self) -> None:
        close(self.leader)


#: As the other rank sees rank 0, and as that sees the others.
Joined = tuple[OtherRank, list[OtherRank]]
SHAPE, LAYOUT = (4, 1, 2, 4, 2, 8), KvLayout("m", 1, 4, 4, 8, "float32")


@pytest.fixture
def joined() -> Iterator[Joined]:
    address = (listener := Listener("core")).path
    with listener:
        other = connect(address, 1)
        peers = accept(listener, 2)
    yield other, peers
    for each in (other, *peers):
        close(each)


@pytest.fixture
def pair(joined: Joined) -> Iterator[Pair]:
    leader, peers = joined
    group = RankGroup(ThreadCommunicator(0, [None, None], None))  # type: ignore[arg-type]
    lost: queue.Queue[str] = queue.Queue()
    pair = Pair(Team(group, peers, lost.put), leader, lost)
    yield pair
    pair.team.close()
    pair.end_of_other()


def close(peer: OtherRank) -> None:
    for channel in (peer.commands, peer.transfers, peer.lifeline):
        channel.connection.close()


class Runner(ModelRunner):
    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run
        self.pool = KvPool(torch.zeros(1, 1, 2, 16, 1, 2))

    def run(self, rows: Any) -> torch.Tensor:
        return self._run()


def row() -> Row:
    """Five tokens of a prompt of nine, behind four that are known: the second block is not looked at."""
    request = AddRequest(1, list(range(20, 29)), SamplingSpec(max_tokens=4), "context_and_generation")
    sequence = Sequence.from_request(request, 0, None)
    sequence.num_computed, sequence.blocks = 4, [7, 3]
    return Row.of(sequence, 5)


def test_step_message_has_only_what_a_forward_needs(pair: Pair) -> None:
    pair.leader.commands.send(Built())
    led = pair.team.broadcasting(Runner(lambda: torch.ones(1)))
    assert led.run([row()]).tolist() == [1.0]
    command = pair.leader.commands.receive(_commands)
    assert command == Step([ForwardRow([24, 25, 26, 27, 28], 4, [7], True, 1)])
    assert command.rows[0].num_tokens == 5
    assert command.rows[0].num_computed == 4


def test_load_error_of_a_rank_is_raised_with_its_type(pair: Pair) -> None:
    pair.leader.commands.send(Broken("ConfigError", "model: no weights"))
    with pytest.raises(ConfigError, match="model: no weights"):
        pair.team.broadcasting(Runner(lambda: torch.ones(1)))


def test_an_unknown_error_of_a_rank_names_the_rank(pair: Pair) -> None:
    pair.leader.commands.send(Broken("MemoryError", "not enough"))
    with pytest.raises(RankLostError, match="rank 1 of the engine: MemoryError: not enough"):
        pair.team.broadcasting(Runner(lambda: torch.ones(1)))


def test_a_rank_that_dies_is_named(pair: Pair) -> None:
    pair.end_of_other()
    assert pair.lost.get(timeout=_SECONDS) == f"rank 1 of the engine (process {os.getpid()}) died"


def test_failure_of_a_rank_is_reported_with_its_error(pair: Pair) -> None:
    pair.leader.lifeline.send(Broken("RuntimeError", "bad kernel"))
    assert pair.lost.get(timeout=_SECONDS) == "rank 1 of the engine: RuntimeError: bad kernel"
    pair.end_of_other()
    assert pair.lost.empty(), "told once"


def test_a_step_that_fails_here_ends_the_engine(pair: Pair) -> None:
    """The other rank waits in the middle of it."""

    def fail() -> torch.Tensor:
        raise RuntimeError("out of memory")

    pair.leader.commands.send(Built())
    led = pair.team.broadcasting(Runner(fail))
    with pytest.raises(RuntimeError, match="out of memory"):
        led.run([row()])
    assert pair.lost.get(timeout=_SECONDS) == "a step failed on rank 0: RuntimeError: out of memory"


def test_a_rank_that_ends_after_the_team_is_not_reported(pair: Pair) -> None:
    pair.team.close()
    assert pair.leader.commands.receive(_commands) == Stop()
    pair.end_of_other()
    pair.team.lost("this must not be told")
    assert pair.lost.empty()


def test_a_closed_channel_is_the_end_of_the_messages() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"\x05\x00\x00\x00ab")
    theirs.close()
    with ours, pytest.raises(EOFError, match="closed by the peer"):
        Channel(ours).receive(_commands)


def test_ranks_that_find_two_transports_do_not_start(joined: Joined) -> None:
    (other, peers), fake = joined, FakeTransport()
    transport = TeamTransport(fake, peers)
    transport.allocate(SHAPE, torch.float32, torch.device("cpu"))
    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(transport.serve, "sender")
        asked = other.transfers.receive(msgspec.msgpack.Decoder(Serve))
        other.transfers.send(Done(asked.id, transport="SHARED_MEMORY"))
        with pytest.raises(ConfigError, match="rank 0 finds FAKE, rank 1 SHARED_MEMORY"):
            served.result(_SECONDS)
    fake.close()


def test_a_read_that_fails_on_rank_0_ends_when_the_other_rank_has_ended(joined: Joined) -> None:
    """Until then its blocks may be written, whatever kind of error rank 0 has met."""
    (other, peers), fake = joined, FakeTransport()
    fake.then("read", Fails(RuntimeError("dictionary changed size")))
    transport = TeamTransport(fake, peers)
    transport.allocate(SHAPE, torch.float32, torch.device("cpu"))
    shards = [Shard(f"sender/{rank}", b"") for rank in range(2)]
    card = PeerMetadata("sender", "FAKE", LAYOUT, 4, join_addresses(shards))
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(transport.read, card, BlockPairs.of([0], [0]), 10.0)
        asked = other.transfers.receive(msgspec.msgpack.Decoder(Read))
        wait_until(lambda: fake.count("read") == 1)
        assert wait({read}, 0.2).not_done
        other.transfers.send(Done(asked.id))
        with pytest.raises(RuntimeError, match="dictionary changed size"):
            read.result(_SECONDS)
    fake.close()


def test_a_late_read_of_another_rank_has_ended_when_its_transport_says_so(joined: Joined) -> None:
    (other, peers), landed = joined, threading.Event()
    fakes = FakeTransport(), FakeTransport()
    transport, service = TeamTransport(fakes[0], peers), TransferService(other.transfers)
    transport.allocate(SHAPE, torch.float32, torch.device("cpu"))
    service.start(fakes[1], fakes[1].allocate(SHAPE, torch.float32, torch.device("cpu")), 1, 2)
    card = PeerMetadata("sender", "FAKE", LAYOUT, 4, transport.serve("sender"))
    fakes[1].then("read", TakesTooLong(landed))
    with pytest.raises(ReadTimeoutError) as timeout:
        transport.read(card, BlockPairs.of([0], [1]), 10.0)
    assert timeout.value.may_land_later
    assert not timeout.value.has_ended()
    landed.set()
    assert timeout.value.has_ended()
    assert timeout.value.has_ended(), "asked again"
    transport.close()


def test_a_read_of_another_rank_begins_when_that_rank_has_done_what_it_was_told_before(pair: Pair) -> None:
    """A copy of a block that is filled anew, say. A step that runs meanwhile is none of these: reads run beside it."""
    fakes = FakeTransport(), FakeTransport()
    transport, service = TeamTransport(fakes[0], pair.team.others), TransferService(pair.leader.transfers)
    kv = transport.allocate(SHAPE, torch.float32, torch.device("cpu"))
    service.start(fakes[1], fakes[1].allocate(SHAPE, torch.float32, torch.device("cpu")), 1, 2)
    card = PeerMetadata("sender", "FAKE", LAYOUT, 4, transport.serve("sender"))

    def read() -> int:
        return transport.read(card, BlockPairs.of([0], [1]), 10.0)

    def read_in_a_step() -> torch.Tensor:
        assert read() > 0
        return torch.ones(1)

    pair.leader.commands.send(Built())
    pair.team.broadcasting(Runner(read_in_a_step)).run([row()])
    pair.team.memory(KvPool(kv)).apply(CopyStart(1, 2, 4))
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        for _ in ("step", "copy"):
            assert wait({reading}, 0.1).not_done
            assert fakes[1].count("read") == 1
            service.executed()
        assert reading.result(_SECONDS) > 0
    transport.close()
