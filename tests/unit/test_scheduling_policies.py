"""Any policy, any order of events, a pool that is too small: everybody gets the answer of an undisturbed run."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.replay import Replay
from tests.scheduling import HANDLE, TILE, Engine, sequence
from trtllm_disagg.embedded.block_manager import event_hash
from trtllm_disagg.embedded.sequence import Status

KINDS = ["context_and_generation", "context_and_generation", "context_only", "generation_only"]


MOST_NEW = 24


@functools.cache
def solo(prompt: tuple[int, ...], max_tokens: int, size: int) -> list[int]:
    """Alone, in one piece, in a pool with room for everything."""
    engine = Engine(64, size, {"max_num_tokens": 1024, "kv_cache_config": {"enable_block_reuse": False}})
    engine.scheduler.add(sequence(0, len(prompt), max_tokens, prompt=list(prompt)))
    engine.drain()
    return engine.answers[0]


def prompt_of(stem: int, length: int, fork: int) -> list[int]:
    """Prompts with the same stem are the same up to where one of them forks."""
    return [stem] * min(length, fork) + [10 + fork] * max(0, length - fork)


add = st.tuples(
    st.just("add"),
    st.builds(
        prompt_of,
        st.integers(1, 2),
        st.sampled_from([1, 17, 32, 33, 60, 72]),
        st.sampled_from([3, 20, 37, 50, 99]),
    ),
    st.sampled_from([1, 9, MOST_NEW, MOST_NEW]),
    st.sampled_from(KINDS),
)
other = st.tuples(st.sampled_from(["step", "step", "step", "receive", "fail", "lease", "evict", "abort"]))
settings_of_an_engine = st.fixed_dictionaries(
    {
        "capacity": st.sampled_from(
            ["MAX_UTILIZATION", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"]
        ),
        "chunking": st.sampled_from([None, "EQUAL_PROGRESS", "FORCE_CHUNK"]),
        "chunked": st.booleans(),
        "max_num_tokens": st.integers(TILE, 140),
        "max_batch_size": st.integers(1, 6),
        "swap_tokens": st.sampled_from([0, 40, 10_000, None]),
        "reuse": st.booleans(),
        "partial": st.booleans(),
        "copy": st.booleans(),
        "resume_at": st.sampled_from([0.5, 0.95]),
    }
)


def build(size: int, num_tokens: int, chosen: dict[str, Any]) -> Engine:
    if not chosen["chunked"]:  # the core refuses longer prompts
        chosen["max_num_tokens"] = max(chosen["max_num_tokens"], 72)
    args = {
        "max_batch_size": chosen["max_batch_size"],
        "max_num_tokens": chosen["max_num_tokens"],
        "enable_chunked_prefill": chosen["chunked"],
        "embedded": {"swap_tokens": chosen["swap_tokens"]},
        "scheduler_config": {
            "capacity_scheduler_policy": chosen["capacity"],
            "context_chunking_policy": chosen["chunking"],
        },
        "kv_cache_config": {
            "tokens_per_block": size,
            "enable_block_reuse": chosen["reuse"],
            "enable_partial_reuse": chosen["partial"],
            "copy_on_partial_reuse": chosen["copy"],
            "max_util_for_resume": chosen["resume_at"],
        },
    }
    return Engine(num_tokens // size, size, args)


class Run:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.replay = Replay()
        self.wanted: dict[int, list[int]] = {}
        self.next = 0

    def add(self, prompt: list[int], max_tokens: int, kind: str) -> None:
        self.next += 1
        handle = HANDLE if kind == "generation_only" else None
        self.engine.scheduler.add(
            sequence(self.next, len(prompt), max_tokens, prompt=prompt, handle=handle, request_type=kind)
        )
        whole = solo(tuple(prompt), MOST_NEW, self.engine.tokens_per_block)
        self.wanted[self.next] = whole[: 1 if kind == "context_only" else max_tokens]

    def do(self, action: str) -> None:
        engine = self.engine
        match action:
            case "step":
                engine.step()
            case "receive" if engine.receiving:
                engine.receive()
            case "fail" if engine.receiving:
                self.wanted.pop(engine.receiving[0].request_id, None)
                engine.receive(fails=True)
            case "lease" if engine.leased:
                engine.end_lease()
            case "evict":
                engine.blocks.release(engine.blocks.allocate(engine.blocks.num_available))
            case "abort" if engine.scheduler.everyone():
                victim = engine.scheduler.everyone()[-1].request_id
                self.wanted.pop(victim, None)
                engine.abort(victim)

    def check(self) -> None:
        self.engine.blocks.check()
        self.replay.apply(self.engine.events.take())
        assert self.replay.known == {event_hash(key) for key in self.engine.blocks.known_keys()}


@settings(max_examples=100)
@given(
    size=st.sampled_from([4, 16, 32]),
    num_tokens=st.sampled_from([96, 128, 224]),
    chosen=settings_of_an_engine,
    at_first=st.lists(add, min_size=3, max_size=6),
    later=st.lists(st.one_of(add, other), max_size=40),
)
def test_everybody_gets_the_answer_of_an_undisturbed_run_and_every_block_comes_back(
    size: int, num_tokens: int, chosen: dict[str, Any], at_first: list[Any], later: list[Any]
) -> None:
    run = Run(build(size, num_tokens, chosen))
    for action in at_first + later:
        if action[0] == "add":
            run.add(*action[1:])
        else:
            run.do(action[0])
        run.check()
    run.engine.drain()
    run.check()
    event(f"somebody was paused: {run.engine.scheduler.counts.paused > 0}")
    assert {key: run.engine.answers[key] for key in run.wanted} == run.wanted
    assert run.engine.blocks.num_available == run.engine.num_blocks
    assert run.engine.memory._saved == {}, "KV of nobody is kept aside"


def busy(**args: Any) -> Engine:
    """Four whose prompts fit together into twelve blocks, but whose answers do not."""
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
        paused += [s.order for s in after if s not in before]
        resumed += [s.order for s in before if s.status is Status.RUNNING]
        assert [s.order for s in after] == sorted(s.order for s in after)
        if not engine.scheduler.everyone():
            break
    assert paused[0] == 3, "the youngest goes first"
    assert 0 not in paused, "the oldest never does"
    assert resumed
    assert engine.answers == {i: solo((i,) * 40, 60, 16) for i in range(1, 5)}


def test_who_comes_back_gets_further_before_being_paused_again() -> None:
    policy = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    engine = Engine(30, 4, {"scheduler_config": policy, "embedded": {"swap_tokens": 10_000}})
    for request_id in range(8):
        engine.scheduler.add(sequence(request_id, 10, max_tokens=20 + 10 * (request_id % 3)))
    at_last_pause: dict[int, int] = {}
    pauses = 0
    while engine.scheduler.everyone():
        before = list(engine.scheduler.paused)
        engine.step()
        for s in set(engine.scheduler.paused) - set(before):
            assert len(s.tokens) > at_last_pause.get(s.order, 0)
            at_last_pause[s.order] = len(s.tokens)
            pauses += 1
    assert pauses > len(at_last_pause), "somebody was paused twice"


def test_nobody_is_admitted_while_somebody_is_paused() -> None:
    engine = busy()
    while not engine.scheduler.paused:
        engine.step()
    engine.scheduler.add(sequence(9, 1, max_tokens=1))
    while engine.scheduler.paused:
        assert [s.request_id for s in engine.scheduler.waiting] == [9]
        engine.step()
    engine.drain()


def test_what_is_put_aside_is_not_computed_again() -> None:
    tokens = {}
    for swap_tokens in (0, 10_000):
        engine = busy(embedded={"swap_tokens": swap_tokens})
        count = 0
        while engine.scheduler.everyone():
            count += sum(row.num_tokens for row in engine.step())
        tokens[swap_tokens] = count
    assert tokens[10_000] == 4 * (40 + 59), "every token once"
    assert tokens[0] > tokens[10_000]


def test_the_space_aside_is_bounded() -> None:
    engine = busy(embedded={"swap_tokens": 4 * 16})
    most = 0
    while engine.scheduler.everyone():
        engine.step()
        most = max(most, sum(saved.shape[2] for saved in engine.memory._saved.values()))
    assert 0 < most <= 4


def test_more_run_at_once_than_with_guaranteed_blocks() -> None:
    at_once = {}
    for policy in ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT"):
        engine = busy(scheduler_config={"capacity_scheduler_policy": policy})
        engine.step()
        at_once[policy] = len(engine.scheduler.running)
    assert at_once == {"MAX_UTILIZATION": 4, "GUARANTEED_NO_EVICT": 1}


def test_the_last_one_left_waits_for_leases_that_hold_its_blocks() -> None:
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


@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        ("FIRST_COME_FIRST_SERVED", [(1, 128)]),
        ("EQUAL_PROGRESS", [(1, 64), (2, 40), (3, 10)]),
        ("FORCE_CHUNK", [(1, 32), (2, 32), (3, 10)]),
    ],
)
def test_how_prompts_share_a_step(policy: str, shares: list[tuple[int, int]]) -> None:
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
