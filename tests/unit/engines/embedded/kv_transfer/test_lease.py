"""A lease ends exactly once, and only then do its blocks go."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.clock import Clock
from trtllm_disagg.engines.embedded.kv_transfer.pull import Lease, LeaseTable

SECONDS = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    return LeaseTable(SECONDS, clock)


def grant(table: LeaseTable, request_id: int = 1, blocks: list[int] | None = None) -> Lease:
    lease = table.grant(request_id, blocks or [request_id])
    lease.digest = bytes([request_id % 256]) * 16
    return lease


def test_lease_can_be_finished_once(table: LeaseTable) -> None:
    lease = grant(table)
    assert table.finish(lease.id, lease.digest)
    assert not table.finish(lease.id, lease.digest)
    assert [ended.blocks for ended in table.take_ended()] == [[1]]
    assert table.take_ended() == []
    assert not table.has_ended_early(lease.id)


def test_a_lease_without_a_handle_cannot_be_finished(table: LeaseTable) -> None:
    lease = table.grant(1, [1])
    assert not table.finish(lease.id, b"")
    assert not table.finish(lease.id, b"x" * 16)


def test_finish_at_the_exact_end_of_the_lease_is_refused(table: LeaseTable, clock: Clock) -> None:
    in_time, too_late = grant(table, 1), grant(table, 2)
    clock.now = SECONDS - 0.001
    assert table.finish(in_time.id, in_time.digest)
    clock.now = SECONDS
    assert not table.finish(too_late.id, too_late.digest), "its blocks might be gone by now"
    assert table.has_ended_early(too_late.id)
    assert [lease.request_id for lease in table.take_ended()] == [1, 2]


def test_begin_extends_a_lease_once(table: LeaseTable, clock: Clock) -> None:
    lease = grant(table)
    clock.now = SECONDS - 1
    assert table.begin(lease.id, lease.digest)
    clock.now = 2 * SECONDS - 2
    assert table.begin(lease.id, lease.digest), "again, but without more time"
    assert table.take_ended() == []
    assert table.next_deadline() == 2 * SECONDS - 1
    clock.now = 2 * SECONDS - 1
    assert not table.finish(lease.id, lease.digest)
    assert table.has_ended_early(lease.id)


def test_expired_leases_are_taken_without_being_asked_for(table: LeaseTable, clock: Clock) -> None:
    lease = grant(table)
    assert table.next_deadline() == SECONDS
    clock.now = SECONDS
    assert [ended.id for ended in table.take_ended()] == [lease.id]
    assert table.next_deadline() is None
    assert table.has_ended_early(lease.id)
    assert not table.finish(lease.id, lease.digest)


@pytest.mark.parametrize("ended_by", ["prefill", "decode"])
def test_a_lease_that_was_given_back_is_known_as_ended_early(table: LeaseTable, ended_by: str) -> None:
    """So that its decode worker prefills anew; a handoff that was used before is refused for good."""
    lease, used = grant(table, 7), grant(table, 8)
    if ended_by == "prefill":
        table.release_request(7)
    else:
        table.release(lease.id)
    assert table.finish(used.id, used.digest)
    assert not table.begin(lease.id, lease.digest)
    assert table.has_ended_early(lease.id)
    assert not table.has_ended_early(used.id)


class AnyOrder(RuleBasedStateMachine):
    """Whatever ends it, and however often: every granted block comes back once."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = LeaseTable(SECONDS, self.clock)
        self.held: dict[int, Lease] = {}
        self.granted = 0
        self.returned: list[int] = []

    @rule()
    def grant(self) -> None:
        self.granted += 1
        self.held[self.granted] = grant(self.table, self.granted)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), how=st.sampled_from(["begin", "finish", "release", "release_request", "forge"]))
    def end(self, data: st.DataObject, how: str) -> None:
        request_id = data.draw(st.integers(1, self.granted))
        lease = self.held.get(request_id)
        match how:
            case "begin" if lease:
                in_time = lease.deadline > self.clock.now
                assert self.table.begin(lease.id, lease.digest) == in_time
                if not in_time:
                    del self.held[request_id]
            case "finish" if lease:
                in_time = lease.deadline > self.clock.now
                assert self.table.finish(lease.id, lease.digest) == in_time
                del self.held[request_id]
            case "release" if lease:
                self.table.release(lease.id)
                del self.held[request_id]
            case "release_request":
                assert self.table.release_request(request_id) == (lease is not None)
                self.held.pop(request_id, None)
            case "forge":
                assert not self.table.finish(bytes(16), bytes(16))

    @rule(seconds=st.floats(0, SECONDS))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def take(self) -> None:
        self.returned += [block for lease in self.table.take_ended() for block in lease.blocks]
        self.held = {i: lease for i, lease in self.held.items() if lease.deadline > self.clock.now}

    @invariant()
    def the_table_holds_what_is_held(self) -> None:
        assert len(self.table) == len(self.held)

    def teardown(self) -> None:
        self.clock.now += SECONDS
        self.take()
        assert sorted(self.returned) == list(range(1, self.granted + 1))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_concurrent_finish_succeeds_in_exactly_one_thread(table: LeaseTable) -> None:
    leases = [grant(table, i) for i in range(200)]
    start, wins = threading.Barrier(4), list[bool]()

    def finish_all() -> None:
        start.wait()
        wins.extend(table.finish(lease.id, lease.digest) for lease in leases)

    threads = [threading.Thread(target=finish_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(wins) == len(leases)
    assert len(table.take_ended()) == len(leases)
