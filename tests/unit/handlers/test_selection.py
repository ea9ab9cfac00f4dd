"""Which instance gets a request: never one that is gone or has failed it, and in the way that was asked for."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clock import Clock
from tests.support.handling import raw_request, request
from tests.support.stage_client import Described, FakeContext, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.errors import InvalidRequestError, NoInstanceError
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.selection import (
    NEXT,
    BestCached,
    InFlight,
    LeastLoaded,
    Random,
    RoundRobin,
    Selection,
    Selector,
    Weights,
)
from trtllm_disagg.handlers.services import peers_of
from trtllm_disagg.types import GenerateRequest


class Directory:
    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)

    def instance_ids(self) -> Sequence[int]:
        return self.ids

    def instance(self, instance_id: int) -> RecordingStageClient:
        assert instance_id in self.ids
        client = RecordingStageClient(answers=[{"token_ids": [number]} for number in range(3)])
        client.instance_id = instance_id
        return client


def stage(directory: Directory, selector: Selector | None = None, own_id: int = 99) -> Selection:
    return Selection(directory, selector or RoundRobin(), "decode", own_id)


def cached(**tokens: int) -> Any:
    async def overlaps(request: GenerateRequest) -> Mapping[int, int]:
        return {int(name[1:]): count for name, count in tokens.items()}

    return overlaps


async def unable(request: GenerateRequest) -> Mapping[int, int]:
    raise RuntimeError("no endpoints available to route work")


def selectors() -> list[Selector]:
    load = InFlight()
    return [
        RoundRobin(),
        Random(numbers=random.Random(1)),
        LeastLoaded(load),
        BestCached(cached(i1=100, i7=50), load),
        BestCached(unable, load),
    ]


@given(
    st.sets(st.integers(1, 9), max_size=5), st.frozensets(st.integers(1, 9), max_size=5), st.integers(0, 4)
)
async def test_selector_picks_no_instance_that_is_gone_or_has_failed(
    ids: set[int], avoid: frozenset[int], which: int
) -> None:
    selected = stage(Directory(*ids), selectors()[which])
    asked = request()
    for each in avoid:
        asked = asked.avoiding(each)
    if ids - avoid:
        assert (await selected.pick(asked)).instance_id in ids - avoid
    else:
        reason = f"none of {len(ids)} decode instances" if ids else "no decode worker is in discovery"
        with pytest.raises(NoInstanceError, match=reason):
            await selected.pick(asked)


@pytest.mark.parametrize(("avoid", "skipped", "chosen"), [({1}, {2}, 3), ({1, 3}, {2}, 2), ({3}, {1, 2}, 1)])
async def test_a_skipped_instance_is_picked_only_if_every_other_one_is_avoided_or_skipped(
    avoid: set[int], skipped: set[int], chosen: int
) -> None:
    asked = request().skipping(frozenset(skipped))
    for each in avoid:
        asked = asked.avoiding(each)
    assert (await stage(Directory(1, 2, 3), RoundRobin()).pick(asked)).instance_id == chosen


@pytest.mark.parametrize("selector", [RoundRobin(), LeastLoaded(InFlight()), BestCached(unable, InFlight())])
async def test_instances_with_equal_load_take_turns(selector: Selector) -> None:
    chosen = Counter([await selector.choose(request(), [3, 1, 2]) for _ in range(9)])
    assert chosen == {1: 3, 2: 3, 3: 3}


async def test_a_turn_that_a_pin_took_counts_for_the_pinned_instance() -> None:
    selected = stage(Directory(1, 2))
    chosen = Counter[int]()
    for _ in range(6):
        await selected.pick(pinning("2"))
        chosen[(await selected.pick(request())).instance_id] += 1
    assert chosen == {1: 6}


async def test_fresh_prompts_between_repeated_ones_reach_every_instance() -> None:
    """Each prompt comes twice, and the second time to its holder."""
    holder: dict[int, int] = {}

    async def overlaps(request: GenerateRequest) -> Mapping[int, int]:
        return holder

    selector = BestCached(overlaps, InFlight())
    chosen = Counter[int]()
    for _ in range(6):
        holder = {}
        first = await selector.choose(request(), [1, 2])
        holder = {first: 64}
        assert await selector.choose(request(), [1, 2]) == first
        chosen[first] += 1
    assert chosen == {1: 3, 2: 3}


async def test_an_instance_that_comes_back_gets_one_turn_and_not_all_that_it_missed() -> None:
    selector = RoundRobin()
    for _ in range(10):
        await selector.choose(request(), [1, 2])
    assert [await selector.choose(request(), [1, 2, 3]) for _ in range(6)] == [3, 1, 2, 3, 1, 2]


def weights_of(*weights: int) -> Weights:
    """Of the instances 0, 1, 2 ..."""
    known = Weights()
    for instance_id, weight in enumerate(weights):
        known.set(instance_id, weight)
    return known


@given(st.lists(st.integers(1, 2048), min_size=2, max_size=12), st.integers(1, 1000))
async def test_shares_of_turns_are_as_the_weights(weights: list[int], num_turns: int) -> None:
    """An instance has a first turn as soon as it is there; so none is further from its share than a round."""
    one, other = RoundRobin(weights_of(*weights)), RoundRobin(weights_of(*weights))
    ids = range(len(weights))
    chosen = [await one.choose(request(), ids) for _ in range(num_turns)]
    assert chosen == [await other.choose(request(), ids) for _ in range(num_turns)], "it is no chance"
    if num_turns >= len(weights):
        counts = Counter(chosen)
        for each, weight in enumerate(weights):
            share = num_turns * weight / sum(weights)
            assert abs(counts[each] - share) <= len(weights)


async def test_small_instances_have_their_turns_between_those_of_large_ones() -> None:
    selector = RoundRobin(weights_of(256, 64, 256))
    chosen = [await selector.choose(request(), range(3)) for _ in range(18)]
    assert chosen == [0, 1, 2, 0, 2, 0, 2, 0, 2, 0, 1, 2, 0, 2, 0, 2, 0, 2]


@given(
    st.integers(1, 300), st.lists(st.sets(st.integers(0, 6), min_size=1).map(sorted), min_size=1, max_size=60)
)
async def test_equal_weights_give_each_turn_to_the_one_that_has_waited_longest(
    weight: int, candidates: list[list[int]]
) -> None:
    """As without weights, whichever instances may be chosen; an unknown weight is as the others."""
    known = weights_of(*[weight] * 6)
    selectors = RoundRobin(), RoundRobin(known), LeastLoaded(InFlight())
    waited = dict.fromkeys(range(7), -1)
    for turn, ids in enumerate(candidates):
        chosen = [await each.choose(request(), ids) for each in selectors]
        assert chosen == [min(ids, key=lambda each: (waited[each], each))] * len(selectors)
        waited[chosen[0]] = turn


async def test_an_instance_that_comes_back_to_unequal_ones_catches_up_on_one_round() -> None:
    selector = RoundRobin(weights_of(1, 2, 2))
    for ids, num_turns in ((range(3), 5), (range(1, 3), 100)):
        for _ in range(num_turns):
            await selector.choose(request(), ids)
    chosen = Counter([await selector.choose(request(), range(3)) for _ in range(20)])
    assert chosen[0] <= 20 / 5 + 2


def test_an_unknown_weight_is_the_median_of_the_known_ones() -> None:
    known = weights_of(16, 256, 512, 0, -1)
    assert known.of([3, 4]) == [256, 256]
    assert known.of([0, 9]) == [16, 256]
    known.set(1, None)
    assert (known.of([1]), known.are_equal) == ([16], False)
    known.set(2, None)
    assert (known.of([0, 1, 2]), known.are_equal) == ([16, 16, 16], True)


async def test_a_random_instance_is_chosen_as_often_as_its_weight_says() -> None:
    selector = Random(weights_of(16, 256), random.Random(5))
    chosen = Counter([await selector.choose(request(), [0, 1]) for _ in range(2000)])
    assert chosen[0] == pytest.approx(2000 * 16 / 272, rel=0.2)


async def test_load_counts_relative_to_the_weight() -> None:
    load = InFlight()
    for each, weight in ((1, 16), (2, 256)):
        load.weights.set(each, weight)
        load.add(each, 100)
    assert await LeastLoaded(load).choose(request(), [1, 2]) == 2
    load.add(2, 1499)
    assert await LeastLoaded(load).choose(request(), [1, 2]) == 2
    load.add(2, 2)
    assert await LeastLoaded(load).choose(request(), [1, 2]) == 1
    assert await BestCached(cached(i2=64), load).choose(request(), [1, 2]) == 2


async def test_kv_selector_picks_the_best_cached_instance_unless_its_load_outweighs_it() -> None:
    load = InFlight()
    selector = BestCached(cached(i1=64), load)
    assert [await selector.choose(request(), [1, 2, 3]) for _ in range(3)] == [1, 1, 1]
    load.add(1, 65)
    assert await selector.choose(request(), [1, 2, 3]) in (2, 3)


async def test_a_router_that_hangs_delays_no_request_and_is_asked_again_after_a_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = 0

    async def hanging(request: GenerateRequest) -> Mapping[int, int]:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise AssertionError

    clock, load = Clock(), InFlight()
    load.add(1, 5)
    selector = BestCached(hanging, load, seconds=0.01, clock=clock)
    assert [await selector.choose(request(), [1, 2]) for _ in range(3)] == [2, 2, 2]
    assert "TimeoutError" in caplog.text
    assert asked == 1
    clock.now += 5.0
    await selector.choose(request(), [1, 2])
    assert asked == 2


async def test_kv_router_failure_is_logged_once_until_a_recovery(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([unable, unable, cached(i2=10), unable, unable])
    selector = BestCached(lambda asked: next(outcomes)(asked), InFlight())
    for _ in range(5):
        await selector.choose(request(), [1, 2])
    assert caplog.text.count("load alone decides") == 2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5))
async def test_least_loaded_keeps_loads_within_one_request_of_the_mean(
    lengths: list[int], num_instances: int
) -> None:
    """Greedy: no instance ever has more than the average and one request."""
    load = InFlight()
    selector = LeastLoaded(load)
    ids = list(range(1, num_instances + 1))
    for tokens in lengths:
        load.add(await selector.choose(request(), ids), tokens)
    assert max(load[each] for each in ids) <= sum(lengths) / num_instances + max(lengths)
    fewest = min(ids, key=lambda each: load[each])
    assert load[await selector.choose(request(), ids)] == load[fewest]
    load.add(8, 0)
    assert load[8] == 0, "an empty prompt is no load"


async def test_running_call_counts_as_load_of_its_instance() -> None:
    load = InFlight()
    config = WorkerConfig(model="m", role=Role.PREFILL)
    peers = peers_of(config, Selection(Directory(1), RoundRobin(), "decode"), in_flight=load)
    answers = (await peers.pick(request())).answers(
        raw_request(phase_request={"phase": "decode"}), FakeContext()
    )
    assert load[1] == 0
    await anext(answers)
    assert load[1] == 3
    await answers.aclose()
    assert load[1] == 0


# -- pins


def pinning(*words: str) -> GenerateRequest:
    return request(annotations=[NEXT + word for word in words])


async def test_pinned_request_goes_to_its_pinned_instances() -> None:
    selected = stage(Directory(0x1A, 0x2B, 0x3C))
    assert {(await selected.pick(pinning("2b"))).instance_id for _ in range(5)} == {0x2B}
    assert {(await selected.pick(pinning("2b,3c"))).instance_id for _ in range(6)} == {0x2B, 0x3C}


LARGEST = (1 << 64) - 1


@pytest.mark.parametrize(
    ("word", "pinned"),
    [
        *((word, 0x2B) for word in ("2b", "2B", " 43")),
        ("10", 0x10),
        *((word, LARGEST) for word in (f"{LARGEST:x}", str(LARGEST))),
    ],
)
async def test_ids_are_hexadecimal_or_decimal_and_hexadecimal_if_ambiguous(word: str, pinned: int) -> None:
    selected = stage(Directory(10, 0x10, 0x1A, 0x2B, LARGEST))
    asked = pinning(word)
    selected.check(asked)
    assert (await selected.pick(asked)).instance_id == pinned


@pytest.mark.parametrize(
    ("routing", "annotations", "expected"),
    [
        ({"prefill_worker_id": 3}, [], {3}),
        # Dynamo's frontend lets only the first of them through for a second stage, whatever role that has.
        ({"prefill_worker_id": 99, "decode_worker_id": 3}, [], {3}),
        ({"prefill_worker_id": 99, "decode_worker_id": 99}, [], {1, 2, 3}),
        ({"prefill_worker_id": 1}, [NEXT + "2"], {2}),
    ],
)
async def test_dynamos_pins_are_followed_except_for_this_worker_and_below_an_annotation(
    routing: dict[str, int], annotations: list[str], expected: set[int]
) -> None:
    selected = stage(Directory(1, 2, 3), own_id=99)
    asked = request(routing=routing, annotations=annotations)
    selected.check(asked)
    assert {(await selected.pick(asked)).instance_id for _ in range(6)} == expected
    assert asked.trace.fallbacks == []


async def test_pins_of_a_relayed_request_are_used_only_for_known_instances() -> None:
    """It was checked where it came in, against the instances that are seen from there."""
    selected = stage(Directory(1, 2))
    for asked, expected in (({"prefill_worker_id": 5}, {1, 2}), ({"prefill_worker_id": 2}, {2})):
        phase_request = request(phase_request={"phase": "whole", "strategy": "prefill_first"}, routing=asked)
        selected.check(phase_request)
        assert {(await selected.pick(phase_request)).instance_id for _ in range(4)} == expected
        assert phase_request.trace.fallbacks == []


UNKNOWN = "pinned decode instance 5 is not known"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (pinning("5"), f"{UNKNOWN}; expected one of 1a, 2b"),
        (pinning("1a,5"), UNKNOWN),
        (request(routing={"decode_worker_id": 5}), UNKNOWN),
        (request(routing={"prefill_worker_id": 5}), UNKNOWN),
        *((pinning(word), f"'disagg:next={word}'") for word in ("xyz", "", "-1", "f" * 17)),
        (pinning("1a,"), "'disagg:next='"),
    ],
)
def test_pin_to_an_unknown_instance_is_refused(asked: GenerateRequest, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        stage(Directory(0x1A, 0x2B)).check(asked)


@pytest.mark.parametrize("why", ["is gone", "failed or is skipped"])
async def test_pinned_instance_that_is_gone_or_failed_is_replaced_with_a_trace_entry(why: str) -> None:
    directory = Directory(1, 2)
    selected = stage(directory)
    asked = pinning("2")
    await selected.pick(asked)
    if why == "is gone":
        directory.ids.remove(2)
    else:
        asked = asked.avoiding(2)
    selected.check(asked)
    # The second try does not repeat the entry.
    assert [(await selected.pick(asked)).instance_id for _ in range(2)] == [1, 1]
    assert asked.trace.fallbacks == [f"other_instance: pinned decode instance 2 {why}"]


async def test_remaining_pins_are_used_when_one_has_failed() -> None:
    selected = stage(Directory(1, 2, 3))
    asked = pinning("2,3").avoiding(2)
    assert {(await selected.pick(asked)).instance_id for _ in range(4)} == {3}
    assert asked.trace.fallbacks == []


def test_only_the_last_instances_are_remembered() -> None:
    directory = Directory()
    selected = stage(directory)
    for first in range(0, 6000, 1000):
        directory.ids = list(range(first, first + 1000))
        selected.instance_ids()
    selected.check(pinning("f42"))  # 3906
    with pytest.raises(InvalidRequestError, match="pinned decode instance 1f4 is not known"):
        selected.check(pinning("1f4"))


@pytest.mark.parametrize("slots", [[64], [16, 256]], ids=["equal", "unequal"])
@pytest.mark.parametrize("selector", ["round_robin", "random", "least_loaded", "kv"])
async def test_a_request_among_a_thousand_peers_calls_no_more_functions_than_among_ten(
    selector: str, slots: list[int]
) -> None:
    few, many = [await calls_of_a_request(selector, count, slots) for count in (10, 1000)]
    assert many <= 1.1 * few


async def calls_of_a_request(selector: str, num_peers: int, slots: list[int]) -> int:
    """Functions of ours that are called to look at the peers for one request, when all are known."""
    load = InFlight()
    for each in range(num_peers):
        load.weights.set(each, slots[each % len(slots)])

    async def none_cached(_: GenerateRequest) -> dict[int, int]:
        return {}

    selectors: dict[str, Selector] = {
        "round_robin": RoundRobin(load.weights),
        "random": Random(load.weights),
        "least_loaded": LeastLoaded(load),
        "kv": BestCached(none_cached, load),
    }
    stage = Selection(Described(num_peers), selectors[selector], "decode")
    peers = Peers(stage, CircuitBreaker(3, 5.0), {}, load, clock=Clock())
    facts = PairFacts(Role.PREFILL, EngineFacts(), peers.facts)
    num_calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    asked = request()
    for _ in range(2):
        sys.setprofile(count)
        try:
            num_calls = 0
            await peers.learn()
            peers.check(asked)
            facts.max_new_tokens(asked)
            assert (peers.num_healthy(), peers.depth()) == (num_peers, 0)
            await peers.pick(asked)
        finally:
            sys.setprofile(None)
    return num_calls
