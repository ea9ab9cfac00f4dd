"""Requests that a prefill worker keeps while the decode workers are full, and those it serves when they have failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.handling import collect, request, tokens_of
from tests.support.recording_pair import make_pair, recording_engine
from tests.support.stage_client import FakeContext, RecordingStageClient, SayingInstance
from tests.support.trying import trying
from trtllm_disagg.config.deciders import Occupancy
from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.errors import ConfigError, NoInstanceError, OverloadedError, PeerUnavailableError
from trtllm_disagg.handlers.admission import FallbackBudget, RequestCount, max_total_tokens
from trtllm_disagg.handlers.attempts import (
    FIRST,
    LOCAL,
    Attempt,
    ChainingPlan,
    Decider,
    FactSources,
    Routes,
    create_decider,
)
from trtllm_disagg.handlers.cached_prefix import CachedPrefixes
from trtllm_disagg.handlers.live_state import LiveState, OwnOccupancy, StageOccupancy
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.selection import StageInstance
from trtllm_disagg.handlers.services import build_generate, peers_of
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

pytestmark = pytest.mark.usefixtures("no_leaks")

NAME = "decode_occupancy"


def used(share: float) -> OwnOccupancy:
    own = OwnOccupancy()
    own.update({"kvCacheStats": {"usedNumBlocks": round(share * 1000), "maxNumBlocks": 1000}})
    return own


def live(**values: Any) -> Live[Thresholds]:
    return Live(Thresholds.of(WorkerConfig(model="m", role=Role.PREFILL)).changed(values, "test"))


def decider(
    decode: float | None,
    own: float = 0.0,
    *,
    role: Role = Role.PREFILL,
    kept: RequestCount | None = None,
    **values: Any,
) -> Decider:
    told = None if decode is None else Occupancy(decode, age=0.1)
    known = FactSources(role, CachedPrefixes(4), lambda: 0, used(own), lambda: told, kept or RequestCount())
    return create_decider(NAME, known, live(**values))


@pytest.mark.parametrize(
    ("decode", "own", "both_stages", "reason"),
    [
        (0.89, 0.0, True, "decode_free"),
        (0.9, 0.0, False, "decode_busy"),
        (1.0, 0.49, False, "decode_busy"),
        (1.0, 0.5, True, "prefill_busy"),
        (None, 0.0, True, "load_unknown"),
    ],
)
def test_a_prefill_worker_keeps_a_request_while_only_decode_is_full(
    decode: float | None, own: float, both_stages: bool, reason: str
) -> None:
    asked = request()
    assert decider(decode, own)(asked) == (both_stages, reason)
    if decode is not None:
        assert asked.trace.facts["other_occupancy"] == decode
        assert asked.trace.facts["occupancy_age_ms"] == 100


def test_decode_occupancy_on_a_decode_worker_is_always_remote() -> None:
    assert decider(1.0, role=Role.DECODE)(request()) == (True, "always")


@pytest.mark.parametrize(("limit", "both_stages"), [(24, True), (25, False)])
def test_prompt_and_answer_must_fit_into_the_token_budget(limit: int, both_stages: bool) -> None:
    asked = request(token_ids=list(range(1, 16)), max_tokens=10)
    assert decider(1.0, max_budget_tokens=limit)(asked).both_stages is both_stages


class Slow:
    """A Generate that yields its chunks when the test says so."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.running = 0

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        self.running += 1
        try:
            yield TokenChunk([1])
            await self.go_on.wait()
            yield TokenChunk([2], finish_reason="length")
        finally:
            self.running -= 1


def deciding(decide: Decider, kept: RequestCount, local: Generate, remote: Generate) -> Generate:
    """A prefill worker that keeps what `decide` says."""
    config = WorkerConfig(model="m", role=Role.PREFILL, strategy="prefill_first")
    alone = Attempt(FIRST, local, enter=lambda request: kept.enter(max_total_tokens(request)))
    routes = {LOCAL: [alone], "prefill_first": [Attempt(FIRST, remote)]}
    plan = ChainingPlan(
        Role.PREFILL.value,
        {Role.PREFILL.value: alone},
        Routes(routes, "prefill_first", "decode_first", [], None),
        decide,
        decide,
        Live("prefill_first"),
        peers_of(config, RecordingStageClient()),
        PairFacts(Role.PREFILL, EngineFacts()),
        lambda: True,
        gets_prompt_logprobs=True,
    )
    return replace(trying(local), plan=plan)


async def begun(generate: Generate, asked: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
    """One that has given its first chunk."""
    chunks = generate(asked, FakeContext())
    await anext(chunks)
    return chunks


@pytest.mark.parametrize("limits", [{"max_concurrent": 2}, {"max_budget_tokens": 2 * 13}])
async def test_kept_requests_are_bounded_until_one_ends(limits: dict[str, Any]) -> None:
    kept, local, remote = RequestCount(), Slow(), Slow()
    generate = deciding(decider(1.0, kept=kept, **limits), kept, local, remote)
    asked = [request(token_ids=[1, 2, 3], max_tokens=10) for _ in range(4)]

    running = [await begun(generate, each) for each in asked[:3]]

    assert [each.trace.reason for each in asked[:3]] == ["decode_busy", "decode_busy", "kept_enough"]
    assert (local.running, remote.running) == (2, 1)
    assert (kept.requests, kept.tokens) == (2, 26)
    await running[0].aclose()
    running.append(await begun(generate, asked[3]))
    assert asked[3].trace.reason == "decode_busy"
    for each in running:
        await each.aclose()
    assert (kept.requests, kept.tokens, local.running, remote.running) == (0, 0, 0, 0)


# -- in a worker


def worker(
    stage: RecordingStageClient, told: Occupancy | None, strategy: str = "prefill_first", **settings: Any
) -> Generate:
    config = WorkerConfig(
        model="org/model",
        role=Role.PREFILL,
        strategy=strategy,
        prefill_decider=NAME,
        publish_metrics=True,
        **settings,
    )
    live = LiveState.of(config, config.kv_block_size, lambda: told)
    return build_generate(config, recording_engine(), stage, live)


@pytest.mark.parametrize(
    ("occupancy", "strategy", "order", "reason"),
    [
        (0.95, "prefill_first", "local", "decode_busy"),
        (0.95, "auto", "local", "auto_decode_busy"),
        (0.2, "auto", "prefill_first", "auto_long"),
    ],
)
async def test_a_kept_request_runs_whole_and_calls_no_decode_worker(
    occupancy: float, strategy: str, order: str, reason: str
) -> None:
    client = make_pair("prefill_first").client
    asked = request(token_ids=list(range(1, 40)))
    generate = worker(client, Occupancy(occupancy, 0.0), strategy, thresholds={"max_local_prefill_length": 8})
    assert len(tokens_of(await collect(generate, asked))) == 5
    await client.idle()
    assert (asked.trace.strategy, asked.trace.reason) == (order, reason)
    assert (client.requests == []) is (order == "local")


def test_without_statistics_the_decider_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'decode_occupancy' is not allowed; .* --publish-metrics"):
        WorkerConfig(model="m", role=Role.PREFILL, prefill_decider=NAME, publish_metrics=False)


# -- what the other stage says


@dataclass
class Stage:
    instances: dict[int, SayingInstance] = field(default_factory=dict)

    def instance_ids(self) -> Collection[int]:
        return list(self.instances)

    def instance(self, instance_id: int) -> StageInstance:
        return self.instances[instance_id]


def stage(*answers: Any) -> Stage:
    return Stage({number: SayingInstance(number, answer) for number, answer in enumerate(answers)})


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_stage_occupancy_is_the_mean_of_instances_with_a_valid_report() -> None:
    told: list[Any] = [
        {"kv_occupancy": 0.9},
        {"kv_occupancy": 0.5},
        {},
        {"kv_occupancy": "full"},
        {"kv_occupancy": 7},
        {"kv_occupancy": True},
        ["full"],
    ]
    there = stage(*told, PeerUnavailableError("dead"), NoInstanceError("gone"))
    clock = Clock()
    occupancy = StageOccupancy(there, clock)
    assert occupancy.now() is None, "the first request after a pause waits for no answer"
    await settled()
    clock.now += 0.2
    assert occupancy.now() == pytest.approx((0.7, 0.2))


async def test_occupancy_is_polled_at_intervals_with_any_number_of_requests() -> None:
    there = stage({"kv_occupancy": 0.5})
    clock = Clock()
    occupancy = StageOccupancy(there, clock)
    for _ in range(100):
        occupancy.now()
        await asyncio.sleep(0)
    assert there.instances[0].times_asked == 1
    clock.now += 0.25
    occupancy.now()
    await settled()
    assert there.instances[0].times_asked == 2


async def test_occupancy_of_an_instance_is_dropped_when_it_leaves_or_stops_reporting() -> None:
    there = stage({"kv_occupancy": 1.0}, {"kv_occupancy": 0.0})
    clock = Clock()
    occupancy = StageOccupancy(there, clock)
    occupancy.now()
    await settled()
    del there.instances[1]
    assert occupancy.now() == (1.0, 0.0)
    there.instances[0].said = PeerUnavailableError("frozen")
    clock.now += 2.1
    assert occupancy.now() is None
    await settled()
    assert occupancy.now() is None


def test_own_occupancy_is_the_mean_over_ranks_and_zero_before_the_first_step_and_after_clear() -> None:
    own = OwnOccupancy()
    assert own.share == 0.0
    for rank, count in ((0, 50), (1, 100), (0, 80)):
        own.update({"attentionDpRank": rank, "kvCacheStats": {"usedNumBlocks": count, "maxNumBlocks": 100}})
    own.update({"kvCacheStats": None})
    assert own.share == pytest.approx(0.9)
    own.clear()
    assert own.share == 0.0


# -- the fallback's budget


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ({"max_local_fallbacks": 2}, "--max-local-fallbacks 2"),
        ({"max_local_fallback_tokens": 30}, "--max-local-fallback-tokens 30"),
        # One request may exceed it.
        ({"max_local_fallback_tokens": 5}, "--max-local-fallback-tokens 5"),
    ],
)
async def test_requests_beyond_the_fallback_budget_are_overloaded(limits: dict[str, int], flag: str) -> None:
    local = Slow()
    generate = trying([Attempt(FIRST, local, enter=FallbackBudget(live(**limits)).enter)])
    asked = request(token_ids=[1, 2, 3], max_tokens=10)
    running = [await begun(generate, asked) for _ in range(1 if flag.endswith(" 5") else 2)]
    with pytest.raises(OverloadedError, match=rf"{13 * len(running)} tokens \({flag}\)"):
        await begun(generate, asked)
    await running[0].aclose()
    running.append(await begun(generate, asked))
    local.go_on.set()
    for each in running[1:]:
        async with aclosing(each):
            assert [token async for chunk in each for token in chunk.token_ids] == [2]
    assert local.running == 0
    await (await begun(generate, asked)).aclose()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("limit", [0, 3])
async def test_a_lost_stage_costs_the_other_one_no_more_than_its_budget(role: Role, limit: int) -> None:
    strategy = "prefill_first" if role is Role.PREFILL else "decode_first"
    config = WorkerConfig(
        model="org/model", role=role, strategy=strategy, max_tries=1, max_local_fallbacks=limit
    )
    generate = build_generate(config, recording_engine(), RecordingStageClient(), LiveState.of(config, 4))

    outcomes = await asyncio.gather(
        *(collect(generate, request(max_tokens=3)) for _ in range(8)), return_exceptions=True
    )

    refused = [each for each in outcomes if isinstance(each, OverloadedError)]
    answered = [tokens_of(each) for each in outcomes if isinstance(each, list)]
    assert len(refused) + len(answered) == 8
    assert all(len(tokens) == 3 for tokens in answered)
    assert len(answered) == (3 if limit else 8)
    assert len(tokens_of(await collect(generate, request(max_tokens=3)))) == 3, "the budget is free again"
