"""Which sequences run in a step: budgets, alignment, order, and that everything ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scheduling import HANDLE, SIZE, TILE, Engine, sequence
from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager
from trtllm_disagg.engines.embedded.scheduler.scheduler import Scheduler


def make(num_blocks: int = 16, *, chunked: bool = True, **args: Any) -> Engine:
    return Engine(num_blocks, args={"enable_chunked_prefill": chunked, **args})


def parts(num_blocks: int = 16) -> tuple[Scheduler, BlockManager]:
    engine = make(num_blocks)
    return engine.scheduler, engine.blocks


def test_a_sequence_is_admitted_only_with_room_for_its_longest_answer() -> None:
    scheduler, blocks = parts(num_blocks=4)
    scheduler.add(sequence(1, 17, 2 * SIZE))  # 17 + 31 tokens: 3 blocks
    scheduler.add(sequence(2, 17, 1))  # 2 blocks
    assert list(scheduler.admit()) == []
    assert [s.request_id for s in scheduler.running] == [1]
    assert blocks.num_available == 1
    assert len(scheduler.waiting) == 1


def test_waiting_is_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    scheduler, _ = parts(num_blocks=4)
    for request_id, num_prompt in ((1, 40), (2, 40), (3, 4)):
        scheduler.add(sequence(request_id, num_prompt))
    list(scheduler.admit())
    assert [s.request_id for s in scheduler.running] == [1]
    assert [s.request_id for s in scheduler.waiting] == [2, 3]


def test_the_engine_stays_awake_when_the_last_running_sequence_makes_room_for_a_waiting_one() -> None:
    engine = make(max_batch_size=1)
    scheduler = engine.scheduler
    scheduler.add(sequence(1, 4, max_tokens=1))
    scheduler.add(sequence(2, 4, max_tokens=1))
    engine.step()
    assert engine.finished == [1]
    assert scheduler.running == []
    assert scheduler.has_runnable


def test_scheduler_has_nothing_runnable_while_all_blocks_are_leased() -> None:
    scheduler, blocks = parts(num_blocks=2)
    leased = blocks.allocate(2)
    scheduler.add(sequence(1, 4))
    assert not scheduler.has_runnable
    blocks.release(leased)
    assert scheduler.has_runnable


def test_active_requests_are_capped_by_max_num_tokens() -> None:
    engine = make(num_blocks=200, max_batch_size=64, max_num_tokens=TILE)
    scheduler = engine.scheduler
    for request_id in range(40):
        scheduler.add(sequence(request_id, 1, max_tokens=50))
    for _ in range(3):
        engine.step()
    assert scheduler.num_active == TILE


def test_a_prompt_that_waits_for_an_empty_step_is_not_overtaken() -> None:
    """Without chunking a prompt as long as the budget needs a step for itself, and must get it."""
    engine = make(num_blocks=64, chunked=False)
    scheduler = engine.scheduler
    scheduler.add(sequence(1, 4, max_tokens=3))
    engine.step()
    scheduler.add(sequence(2, 64, max_tokens=3))
    for request_id in range(3, 20):
        scheduler.add(sequence(request_id, 4, max_tokens=3))
        engine.step()
    assert engine.finished[:2] == [1, 2]


def test_a_known_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    engine = make(kv_cache_config={"enable_partial_reuse": False})
    scheduler = engine.scheduler
    for _ in range(2):
        scheduler.add(sequence(7, 2 * SIZE, max_tokens=1))
        engine.step()
    again = sequence(7, 2 * SIZE, max_tokens=1)
    scheduler.add(again)
    list(scheduler.admit())
    assert again.num_cached == SIZE, "one token at least is computed, to have logits"
    pulled = sequence(7, 2 * SIZE, max_tokens=1, handle=HANDLE)
    scheduler.add(pulled)
    assert list(scheduler.admit()) == [pulled]
    assert pulled.num_cached == 2 * SIZE, "its first token is known, so all of it may come from the cache"


@pytest.mark.parametrize(("by_priority", "order"), [(False, [1, 2, 3, 4, 5]), (True, [3, 5, 1, 4, 2])])
def test_the_request_that_waits_longest_starts_first_unless_priorities_say_otherwise(
    by_priority: bool, order: list[int]
) -> None:
    policy = "priority" if by_priority else "fcfs"
    engine = make(max_batch_size=1, scheduler_config={"waiting_queue_policy": policy})
    for request_id, priority in enumerate([0.5, 0.1, 0.9, 0.5, 0.9], 1):
        engine.scheduler.add(sequence(request_id, 4, max_tokens=1, priority=priority))
    while len(engine.finished) < len(order):
        engine.step()
    assert engine.finished == order


# -- chunks


@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        ("FIRST_COME_FIRST_SERVED", [(1, 128)]),
        ("EQUAL_PROGRESS", [(1, 64), (2, 40), (3, 10)]),
        ("FORCE_CHUNK", [(1, 32), (2, 32), (3, 10)]),
    ],
)
def test_prompts_share_a_step_by_the_chunking_policy(policy: str, shares: list[tuple[int, int]]) -> None:
    engine = Engine(64, args={"max_num_tokens": 128, "scheduler_config": {"context_chunking_policy": policy}})
    for request_id, num_prompt in ((1, 200), (2, 40), (3, 10)):
        engine.scheduler.add(sequence(request_id, num_prompt))
    assert [(row.sequence.request_id, row.num_tokens) for row in engine.step()] == shares
    engine.drain()
    assert sorted(engine.finished) == [1, 2, 3]


def test_a_prompt_that_the_budget_holds_runs_in_one_pass() -> None:
    engine = Engine(64, args={"max_num_tokens": 512})
    engine.scheduler.add(sequence(1, 500, request_type="context_only"))
    assert [row.num_tokens for row in engine.step()] == [500]
    assert engine.finished == [1]
