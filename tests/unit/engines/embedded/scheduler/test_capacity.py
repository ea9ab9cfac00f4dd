"""Which sequences are paused when KV is full and when they come back, without losing a token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scheduling import HANDLE, Engine, sequence, solo
from trtllm_disagg.engines.embedded.scheduler.sequence import Status


def busy(**args: Any) -> Engine:
    """Four prompts that fit together into twelve blocks, without their answers."""
    engine = Engine(12, args={"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}, **args})
    for request_id in range(1, 5):
        engine.scheduler.add(sequence(request_id, 40, max_tokens=60))
    return engine


@pytest.mark.parametrize("swap_tokens", [0, 10_000], ids=["recomputed", "put aside"])
def test_the_last_one_admitted_is_paused_and_those_paused_come_back_in_order(swap_tokens: int) -> None:
    engine = busy(embedded={"swap_tokens": swap_tokens})
    paused, resumed = [], []
    for _ in range(2000):
        before = list(engine.scheduler.paused)
        engine.step()
        after = engine.scheduler.paused
        paused += [s.admission_number for s in after if s not in before]
        resumed += [s.admission_number for s in before if s.status is Status.RUNNING]
        assert [s.admission_number for s in after] == sorted(s.admission_number for s in after)
        if not engine.scheduler.unfinished():
            break
    assert paused[0] == 3, "the youngest goes first"
    assert 0 not in paused, "the oldest never does"
    assert resumed
    assert engine.answers == {i: solo((i,) * 40, 60, 16) for i in range(1, 5)}


def test_a_resumed_sequence_gets_further_before_being_paused_again() -> None:
    policy = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    engine = Engine(30, 4, {"scheduler_config": policy, "embedded": {"swap_tokens": 10_000}})
    for request_id in range(8):
        engine.scheduler.add(sequence(request_id, 10, max_tokens=20 + 10 * (request_id % 3)))
    at_last_pause: dict[int, int] = {}
    pauses = 0
    while engine.scheduler.unfinished():
        before = list(engine.scheduler.paused)
        engine.step()
        for s in set(engine.scheduler.paused) - set(before):
            assert len(s.tokens) > at_last_pause.get(s.admission_number, 0)
            at_last_pause[s.admission_number] = len(s.tokens)
            pauses += 1
    assert pauses > len(at_last_pause), "no sequence was paused twice"


def test_no_sequence_is_admitted_while_another_is_paused() -> None:
    engine = busy()
    while not engine.scheduler.paused:
        engine.step()
    engine.scheduler.add(sequence(9, 1, max_tokens=1))
    while engine.scheduler.paused:
        assert [s.request_id for s in engine.scheduler.waiting] == [9]
        engine.step()
    engine.drain()


def test_swapped_out_tokens_are_not_computed_again() -> None:
    tokens = {}
    for swap_tokens in (0, 10_000):
        engine = busy(embedded={"swap_tokens": swap_tokens})
        count = 0
        while engine.scheduler.unfinished():
            count += sum(row.num_tokens for row in engine.step())
        tokens[swap_tokens] = count
    assert tokens[10_000] == 4 * (40 + 59), "every token once"
    assert tokens[0] > tokens[10_000]


def test_swapped_out_blocks_are_bounded_by_swap_tokens() -> None:
    engine = busy(embedded={"swap_tokens": 4 * 16})
    most = 0
    while engine.scheduler.unfinished():
        engine.step()
        most = max(most, sum(len(saved) for saved in engine.memory.saved.values()))
    assert 0 < most <= 4


def test_more_run_at_once_than_with_guaranteed_blocks() -> None:
    at_once = {}
    for policy in ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT"):
        engine = busy(scheduler_config={"capacity_scheduler_policy": policy})
        engine.step()
        at_once[policy] = len(engine.scheduler.running)
    assert at_once == {"MAX_UTILIZATION": 4, "GUARANTEED_NO_EVICT": 1}


def test_last_paused_sequence_waits_for_leased_blocks() -> None:
    engine = Engine(4, args={"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}})
    leased = engine.blocks.allocate(2)
    engine.scheduler.add(sequence(1, 30, max_tokens=30))
    for _ in range(10):
        engine.step()
    assert [s.request_id for s in engine.scheduler.paused] == [1]
    asleep = not engine.scheduler.has_runnable
    engine.blocks.release(leased)
    assert asleep, "until the lease ends"
    assert engine.scheduler.has_runnable
    engine.drain()
    assert engine.answers[1] == solo((1,) * 30, 30, 16)


def test_a_prompt_received_whole_that_no_step_can_hold_is_recomputed_in_pieces() -> None:
    """Its KV came from another engine; there was no room to put it aside; chunking is off."""
    engine = Engine(
        10,
        args={
            "max_num_tokens": 32,
            "enable_chunked_prefill": False,
            "embedded": {"swap_tokens": 0},
            "kv_cache_config": {"enable_block_reuse": False},
            "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        },
    )
    for request_id in (1, 2):
        engine.scheduler.add(sequence(request_id, 70, max_tokens=60, handle=HANDLE))
    engine.step()
    for _ in range(2):
        engine.receive()
    engine.drain()
    assert engine.scheduler.counts.paused
    assert engine.answers == {i: solo((i,) * 70, 60, 16) for i in (1, 2)}


def test_a_static_batch_ends_before_the_next_one_starts() -> None:
    engine = Engine(64, args={"scheduler_config": {"capacity_scheduler_policy": "STATIC_BATCH"}})
    for request_id, max_tokens in ((1, 2), (2, 9)):
        engine.scheduler.add(sequence(request_id, 8, max_tokens))
    engine.step()
    engine.scheduler.add(sequence(3, 8, 1))
    while 2 not in engine.finished:
        assert [s.request_id for s in engine.scheduler.waiting] == [3]
        engine.step()
    engine.drain()
    assert engine.finished == [1, 2, 3]
