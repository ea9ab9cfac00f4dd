"""Any policy, any order of events, a pool that is too small: every request gets the answer of an undisturbed run."""

from __future__ import annotations

from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.support.replay import Replay
from tests.support.scheduling import HANDLE, TILE, Engine, sequence, solo
from trtllm_disagg.engines.embedded.kv_cache.block_manager import event_hash

KINDS = ["context_and_generation", "context_and_generation", "context_only", "generation_only"]


MAX_NEW = 24


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
    st.sampled_from([1, 9, MAX_NEW, MAX_NEW]),
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
        whole = solo(tuple(prompt), MAX_NEW, self.engine.tokens_per_block)
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
            case "abort" if engine.scheduler.unfinished():
                victim = engine.scheduler.unfinished()[-1].request_id
                self.wanted.pop(victim, None)
                engine.abort(victim)

    def check(self) -> None:
        self.engine.blocks.check()
        self.replay.apply(self.engine.events.take())
        assert self.replay.known == {event_hash(key) for key in self.engine.blocks.key_of.values()}


@settings(max_examples=100)
@given(
    size=st.sampled_from([4, 16, 32]),
    num_tokens=st.sampled_from([96, 128, 224]),
    chosen=settings_of_an_engine,
    at_first=st.lists(add, min_size=3, max_size=6),
    later=st.lists(st.one_of(add, other), max_size=40),
)
def test_every_request_gets_the_answer_of_an_undisturbed_run_and_every_block_comes_back(
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
    event(f"a sequence was paused: {run.engine.scheduler.counts.paused > 0}")
    assert {key: run.engine.answers[key] for key in run.wanted} == run.wanted
    assert run.engine.blocks.num_available == run.engine.num_blocks
    assert run.engine.memory.saved == {}, "KV of no sequence is kept aside"
