"""Who runs in a step: budgets, alignment, order, and that everything ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_disagg.embedded.block_manager import BlockManager, KvEventLog
from trtllm_disagg.embedded.messages import SamplingSpec
from trtllm_disagg.embedded.scheduler import Scheduler
from trtllm_disagg.embedded.sequence import Sequence, Status
from trtllm_disagg.kv_transfer.handle import VERSION, KvHandle

SIZE = 16
TILE = 32
HANDLE = KvHandle(VERSION, "prefill", "tcp://127.0.0.1:1", b"l" * 16, b"y" * 16, b"p" * 16, 1, [0], 0)


def make(
    num_blocks: int = 16, *, max_batch_size: int = 8, max_num_tokens: int = 64, chunked: bool = True
) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(num_blocks, SIZE, enable_reuse=True, events=KvEventLog(0, 64))
    scheduler = Scheduler(
        blocks,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        chunk_alignment=TILE,
        chunked=chunked,
    )
    return scheduler, blocks


def sequence(
    request_id: int, num_prompt: int, max_tokens: int = 4, *, handle: KvHandle | None = None, **more: Any
) -> Sequence:
    return Sequence(
        request_id=request_id,
        index=0,
        request_type=more.pop("request_type", "generation_only" if handle else "context_and_generation"),
        tokens=[request_id] * num_prompt,
        num_prompt=num_prompt,
        sampling=SamplingSpec(max_tokens=max_tokens),
        seed=0,
        handle=handle,
        **more,
    )


@dataclass
class Engine:
    """The core's loop with no model: every sampled token is a zero."""

    scheduler: Scheduler
    blocks: BlockManager
    max_num_tokens: int
    finished: list[int] = field(default_factory=list)
    receiving: list[Sequence] = field(default_factory=list)

    def step(self) -> None:
        available = self.blocks.num_available
        admitted = list(self.scheduler.admit())
        assert self.blocks.num_available >= 0
        assert self.blocks.num_available <= available
        self.receiving += admitted
        decoding = [s for s in self.scheduler.running if not s.in_prefill]
        rows = self.scheduler.schedule()
        assert [row.sequence for row in rows[: len(decoding)]] == decoding, (
            "decode rows come first, all of them"
        )
        assert all(row.num_tokens == 1 and row.samples for row in rows[: len(decoding)])
        assert sum(row.num_tokens for row in rows) <= self.max_num_tokens
        for row in rows:
            s = row.sequence
            end = s.num_computed + row.num_tokens
            assert row.num_tokens > 0
            assert row.samples or end % TILE == 0, "a chunk that goes on later ends on a tile"
            assert end <= len(s.blocks) * SIZE, "a token without a block"
            s.num_computed = end
            self.blocks.commit(s.tokens[:end], s.blocks, s.keys, b"")
        for row in rows:
            if row.sequence.num_computed == len(row.sequence.tokens):
                self.accept(row.sequence)
        self.blocks.check()

    def receive(self) -> None:
        """The oldest pull is done."""
        s = self.receiving.pop(0)
        s.num_computed = s.num_prompt
        self.scheduler.received(s)
        self.accept(s)

    def accept(self, s: Sequence) -> None:
        s.tokens.append(0)
        if s.num_output >= s.sampling.max_tokens or s.is_context_only:
            self.scheduler.finish(s)
            self.blocks.release(s.blocks)
            self.finished.append(s.request_id)


arrival = st.tuples(
    st.integers(1, 100),  # prompt tokens
    st.integers(1, 40),  # max_tokens
    st.sampled_from(["context_and_generation", "context_only", "generation_only"]),
    st.integers(0, 3),  # steps until the next one
)


@settings(max_examples=80, deadline=None)
@given(
    arrivals=st.lists(arrival, min_size=1, max_size=12),
    num_blocks=st.integers(9, 24),
    max_batch_size=st.integers(1, 6),
    max_num_tokens=st.integers(TILE, 140),
    chunked=st.booleans(),
)
def test_everything_finishes_and_every_block_comes_back(
    arrivals: list[tuple[int, int, str, int]],
    num_blocks: int,
    max_batch_size: int,
    max_num_tokens: int,
    chunked: bool,
) -> None:
    if not chunked:  # the core refuses longer prompts
        max_num_tokens = max(max_num_tokens, 100)
    scheduler, blocks = make(
        num_blocks, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, chunked=chunked
    )
    engine = Engine(scheduler, blocks, max_num_tokens)
    for request_id, (num_prompt, max_tokens, kind, wait) in enumerate(arrivals):
        handle = HANDLE if kind == "generation_only" else None
        scheduler.add(sequence(request_id, num_prompt, max_tokens, handle=handle, request_type=kind))
        for _ in range(wait):
            engine.step()
    # `has_runnable` decides whether the engine's process sleeps: it must never do so while something could run.
    for _ in range(20_000):
        if scheduler.has_runnable:
            engine.step()
        elif engine.receiving:
            engine.receive()
        else:
            break
    assert sorted(engine.finished) == list(range(len(arrivals))), "left behind"
    assert blocks.num_available == num_blocks


def test_a_sequence_is_admitted_only_with_room_for_its_longest_answer() -> None:
    scheduler, blocks = make(num_blocks=4)
    scheduler.add(sequence(1, 17, 2 * SIZE))  # 17 + 31 tokens: 3 blocks
    scheduler.add(sequence(2, 17, 1))  # 2 blocks
    assert list(scheduler.admit()) == []
    assert [s.request_id for s in scheduler.running] == [1]
    assert blocks.num_available == 1
    assert len(scheduler.waiting) == 1


def test_waiting_is_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    scheduler, _ = make(num_blocks=4)
    for request_id, num_prompt in ((1, 40), (2, 40), (3, 4)):
        scheduler.add(sequence(request_id, num_prompt))
    list(scheduler.admit())
    assert [s.request_id for s in scheduler.running] == [1]
    assert [s.request_id for s in scheduler.waiting] == [2, 3]


def test_the_engine_stays_awake_when_the_last_running_sequence_makes_room_for_a_waiting_one() -> None:
    scheduler, blocks = make(max_batch_size=1)
    engine = Engine(scheduler, blocks, 64)
    scheduler.add(sequence(1, 4, max_tokens=1))
    scheduler.add(sequence(2, 4, max_tokens=1))
    engine.step()
    assert engine.finished == [1]
    assert scheduler.running == []
    assert scheduler.has_runnable


def test_the_engine_sleeps_when_all_room_is_leased() -> None:
    scheduler, blocks = make(num_blocks=2)
    leased = blocks.allocate(2)
    scheduler.add(sequence(1, 4))
    assert not scheduler.has_runnable
    blocks.release(leased)
    assert scheduler.has_runnable


def test_no_more_run_at_once_than_the_token_budget_has_rows() -> None:
    scheduler, blocks = make(num_blocks=200, max_batch_size=64, max_num_tokens=TILE)
    engine = Engine(scheduler, blocks, TILE)
    for request_id in range(40):
        scheduler.add(sequence(request_id, 1, max_tokens=50))
    for _ in range(3):
        engine.step()
    assert scheduler.num_active == TILE


def test_nobody_overtakes_a_prompt_that_waits_for_an_empty_step() -> None:
    """Without chunking a prompt as long as the budget needs a step for itself, and must get it."""
    scheduler, blocks = make(num_blocks=64, chunked=False)
    engine = Engine(scheduler, blocks, 64)
    scheduler.add(sequence(1, 4, max_tokens=3))
    engine.step()
    scheduler.add(sequence(2, 64, max_tokens=3))
    for request_id in range(3, 20):
        scheduler.add(sequence(request_id, 4, max_tokens=3))
        engine.step()
    assert engine.finished[:2] == [1, 2]


def test_a_known_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    scheduler, blocks = make()
    engine = Engine(scheduler, blocks, 64)
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
def test_who_waits_first_goes_first_unless_priorities_say_otherwise(
    by_priority: bool, order: list[int]
) -> None:
    blocks = BlockManager(16, SIZE, enable_reuse=True, events=KvEventLog(0, 64))
    scheduler = Scheduler(
        blocks,
        max_batch_size=1,
        max_num_tokens=64,
        chunk_alignment=TILE,
        chunked=True,
        by_priority=by_priority,
    )
    engine = Engine(scheduler, blocks, 64)
    for request_id, priority in enumerate([0.5, 0.1, 0.9, 0.5, 0.9], 1):
        scheduler.add(sequence(request_id, 4, max_tokens=1, priority=priority))
    while len(engine.finished) < len(order):
        engine.step()
    assert engine.finished == order


@pytest.mark.parametrize("status", [Status.WAITING, Status.RECEIVING, Status.RUNNING])
def test_a_finished_sequence_leaves_no_trace_whatever_it_was_doing(status: Status) -> None:
    scheduler, blocks = make()
    victim = sequence(1, 4, handle=HANDLE if status is Status.RECEIVING else None)
    scheduler.add(victim)
    if status is not Status.WAITING:
        list(scheduler.admit())
    assert victim.status is status
    assert scheduler.find(1) == [victim]
    scheduler.finish(victim)
    blocks.release(victim.blocks)
    assert scheduler.find(1) == []
    assert not scheduler.has_runnable
    assert blocks.num_available == blocks.num_blocks
