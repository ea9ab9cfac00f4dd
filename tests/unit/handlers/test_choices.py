"""`n` above 1 of workers that share a request: one prompt, a handoff for each choice, and nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.handling import PROMPT, STRATEGIES, collect, expected_tokens, request, tokens_of
from tests.support.recording_pair import Pair, leftover_tasks, make_pair, recording_engine
from tests.support.stage_client import FakeContext, Instances, RecordingStageClient
from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.llm import LLM, RequestError, SamplingParams, Script
from trtllm_disagg.engines.recording.result import EOS_TOKEN
from trtllm_disagg.errors import DisaggError, EngineError, InvalidRequestError, OverloadedError
from trtllm_disagg.handlers.admission import Admission, Queued
from trtllm_disagg.handlers.run import RunCounts
from trtllm_disagg.handlers.selection import RoundRobin, Selection
from trtllm_disagg.handlers.services import build_generate, peers_of
from trtllm_disagg.types import GenerateRequest, TokenChunk, Usage

pytestmark = pytest.mark.usefixtures("no_leaks")

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def asking(n: int, max_tokens: int = 4, **options: Any) -> GenerateRequest:
    return request(max_tokens, sampling_options={"n": n, "temperature": 0.9, "seed": 5} | options)


def of_choice(index: int, chunks: list[TokenChunk]) -> list[TokenChunk]:
    return [chunk for chunk in chunks if chunk.index == index]


def phases(llm: LLM, phase: str) -> list[dict[str, Any]]:
    calls = llm.calls_of("generate_async")
    return [call for call in calls if call["disaggregated_params"].request_type == phase]


async def test_agg_answers_with_a_request_for_each_choice() -> None:
    engine = recording_engine()
    config = WorkerConfig(model="org/model", role=Role.AGG)
    engine.llm.scripts += [Script(), Script(tokens=[7, 8, EOS_TOKEN])]

    chunks = await collect(build_generate(config, engine, RecordingStageClient()), asking(3))

    assert seeds(engine.llm.calls_of("generate_async")) == [(1, 5), (1, 6), (1, 7)]
    assert [tokens_of(of_choice(i, chunks)) for i in range(3)] == [
        expected_tokens(4),
        [7, 8],
        expected_tokens(4),
    ]
    ends = {chunk.index: chunk.finish_reason for chunk in chunks if chunk.finish_reason}
    assert ends == {0: "length", 1: "stop", 2: "length"}
    assert chunks[-1].completion_usage == Usage.of(len(PROMPT), 4 + 2 + 4, 0)


def seeds(calls: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(call["sampling_params"].n, call["sampling_params"].seed) for call in calls]


@every_strategy
async def test_each_choice_has_a_handoff_and_a_seed_of_its_own_and_the_prompt_counts_once(
    strategy: str,
) -> None:
    pair = make_pair(strategy)

    chunks = await collect(pair.generate, asking(3))
    await pair.idle()

    for index in range(3):
        own = of_choice(index, chunks)
        assert tokens_of(own) == expected_tokens(4)
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]
    assert chunks[-1].completion_usage == Usage.of(len(PROMPT), 3 * 4, 0)
    prefills, decodes = phases(pair.prefill, "context_only"), phases(pair.decode, "generation_only")
    assert seeds(prefills) == [(1, 5), (1, 6), (1, 7)]
    assert sorted(seeds(decodes)) == [(1, 5), (1, 6), (1, 7)]
    ids = [
        {call["disaggregated_params"].disagg_request_id for call in calls} for calls in (prefills, decodes)
    ]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 3
    assert len(LLM.kv_store) == 0


@every_strategy
async def test_further_choices_wait_until_the_prompt_is_computed(strategy: str) -> None:
    pair = make_pair(strategy)
    gate = asyncio.Semaphore(0)
    pair.prefill.scripts.append(Script(gate=gate))
    answering = asyncio.create_task(collect(pair.generate, asking(3)))
    await leftover_tasks()
    assert len(phases(pair.prefill, "context_only")) == 1
    gate.release()
    await answering
    await pair.idle()
    assert len(phases(pair.prefill, "context_only")) == 3


def break_one(strategy: str, pair: Pair) -> None:
    """The peer fails one choice, if it can with tokens that the client has."""
    llm = pair.decode if strategy == "prefill_first" else pair.prefill
    llm.scripts += [Script(), Script(error=EngineError("broken"), error_at=2 if llm is pair.decode else 0)]


@pytest.mark.parametrize("strategy", ["prefill_first", "decode_first"])
async def test_a_choice_that_fails_goes_on_by_itself_behind_its_own_tokens(strategy: str) -> None:
    pair = make_pair(strategy)
    break_one(strategy, pair)

    chunks = await collect(pair.generate, asking(3, 6))
    await pair.idle()

    assert [tokens_of(of_choice(index, chunks)) for index in range(3)] == [expected_tokens(6)] * 3
    assert chunks[-1].completion_usage == Usage.of(len(PROMPT), 3 * 6, 0)
    assert len(LLM.kv_store) == 0


@every_strategy
async def test_the_error_of_one_choice_is_that_of_the_answer_and_leaves_no_kv(strategy: str) -> None:
    pair = make_pair(
        strategy, **({} if strategy == "router" else {"on_missing_stage": "fail", "max_tries": 1})
    )
    pair.decode.scripts += [Script(), Script(error=RequestError("broken"), error_at=2)]
    seen: list[TokenChunk] = []

    with pytest.raises(DisaggError, match="broken"):
        await collect(pair.generate, asking(3, 40), into=seen)
    await pair.idle()

    assert len({chunk.index for chunk in seen if chunk.finish_reason}) < 3
    assert await leftover_tasks() == set()
    assert len(LLM.kv_store) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_choice_that_ends_at_its_first_token_needs_no_decode(strategy: str) -> None:
    pair = make_pair(strategy)
    at_once = Script(tokens=[EOS_TOKEN])
    pair.prefill.scripts += [Script(), at_once]
    if strategy == "router":
        pair.decode.scripts += [Script(), Script(), at_once]  # which computes what has no handoff

    chunks = await collect(pair.generate, asking(3))
    await pair.idle()

    made = sorted((tokens_of(own), own[-1].finish_reason) for own in (of_choice(i, chunks) for i in range(3)))
    assert made == [([], "stop"), (expected_tokens(4), "length"), (expected_tokens(4), "length")]
    assert len(LLM.kv_store) == 0


@every_strategy
async def test_choices_that_one_engine_would_refuse_are_refused_in_its_words(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM's SamplingParams refuse n above 1 without sampling."""

    @dataclass
    class Strict(SamplingParams):
        def __post_init__(self) -> None:
            if self.n > 1 and self.temperature == 0:
                raise ValueError("Greedy decoding is not allowed with n=2")

    monkeypatch.setattr("trtllm_disagg.engines.recording.llm.SamplingParams", Strict)
    pair = make_pair(strategy)
    with pytest.raises(InvalidRequestError, match="n=2"):
        await collect(pair.generate, asking(2, temperature=0.0))
    assert pair.prefill.calls_of("generate_async") == []
    assert len({chunk.index for chunk in await collect(pair.generate, asking(2))}) == 2
    await pair.idle()


async def test_choices_without_a_seed_get_different_ones() -> None:
    pair = make_pair("decode_first")
    await collect(pair.generate, asking(3, seed=None))
    first, *others = [seed for _, seed in seeds(phases(pair.prefill, "context_only"))]
    assert others == [first + 1, first + 2]


@every_strategy
async def test_calls_at_the_same_time_have_different_request_ids(strategy: str) -> None:
    """Dynamo fails the later one of two calls with the same id to one worker."""
    pair = make_pair(strategy)
    await collect(pair.generate, asking(3))
    await pair.idle()
    ids = [call.context.id() for call in pair.client.calls]
    assert sorted(ids) == (
        ["request-1"] if strategy == "router" else ["request-1", "request-1-1", "request-1-2"]
    )


async def test_a_phase_of_several_choices_reaches_no_engine() -> None:
    engine = recording_engine()
    with pytest.raises(InvalidRequestError, match="n=2"):
        engine.start_prefill(asking(2))
    assert engine.llm.calls_of("generate_async") == []


async def test_all_prefills_are_where_the_first_one_was() -> None:
    def prefill_worker() -> tuple[LLM, RecordingStageClient]:
        engine = recording_engine()
        config = WorkerConfig(model="org/model", role=Role.PREFILL, strategy="decode_first")
        return engine.llm, RecordingStageClient(build_generate(config, engine, RecordingStageClient()))

    llms, clients = zip(*[prefill_worker() for _ in range(3)], strict=True)
    config = WorkerConfig(model="org/model", role=Role.DECODE, strategy="decode_first")
    selection = Selection(Instances(clients), RoundRobin(), "prefill")
    generate = build_generate(config, recording_engine(), peers_of(config, selection))

    for number in (1, 2, 3):
        await collect(generate, asking(4))
        assert [len(llm.calls_of("generate_async")) for llm in llms] == [4] * number + [0] * (3 - number)


async def test_all_choices_wait_and_are_admitted_together() -> None:
    queued, engine = Queued(), recording_engine()
    config = WorkerConfig(model="org/model", strategy="decode_first", role=Role.DECODE, max_queued_requests=2)
    counts = RunCounts(Admission(Live(Thresholds.of(config)), queued))
    prefill = WorkerConfig(model="org/model", role=Role.PREFILL, strategy="decode_first")
    gate = asyncio.Semaphore(0)
    prefill_engine = recording_engine()
    prefill_engine.llm.scripts.append(Script(gate=gate))
    client = RecordingStageClient(build_generate(prefill, prefill_engine, RecordingStageClient()))
    generate = build_generate(config, engine, client, counts=counts)

    answering = asyncio.create_task(collect(generate, asking(3)))
    await leftover_tasks()
    assert (queued.requests, queued.tokens) == (3, len(PROMPT))
    with pytest.raises(OverloadedError):
        await collect(generate, asking(2))
    gate.release()
    assert len({chunk.index for chunk in await answering}) == 3
    assert (queued.requests, queued.tokens) == (0, 0)


async def test_the_trace_of_a_choice_names_it_and_its_own_fallbacks() -> None:
    pair = make_pair("decode_first")
    break_one("decode_first", pair)
    chunks = await collect(pair.generate, asking(2, 6))
    ends = {chunk.index: chunk.engine_data or {} for chunk in chunks if chunk.finish_reason}
    told = [ends[index]["disagg"] for index in (0, 1)]
    assert [each["choice"] for each in told] == [0, 1]
    assert ["fallbacks" in each for each in told] == [False, True]


@settings(max_examples=150)
@given(
    strategy=st.sampled_from(STRATEGIES),
    n=st.integers(2, 4),
    leaves=st.sampled_from(["never", "closes", "stops", "is cancelled"]),
    after_chunks=st.integers(0, 12),
    after_ticks=st.integers(0, 60),
    fails_at=st.none() | st.integers(0, 4),
)
def test_however_an_answer_ends_no_choice_is_left_behind(
    strategy: str, n: int, leaves: str, after_chunks: int, after_ticks: int, fails_at: int | None
) -> None:
    asyncio.run(leave(strategy, n, leaves, after_chunks, after_ticks, fails_at))


async def leave(
    strategy: str, n: int, leaves: str, after_chunks: int, after_ticks: int, fails_at: int | None
) -> None:
    LLM.forget_instances()
    pair = make_pair(strategy)
    if fails_at is not None:
        pair.decode.scripts += [Script()] * (n - 1) + [Script(error=RequestError("x"), error_at=fails_at)]
    context, seen = FakeContext(), list[TokenChunk]()
    chunks = pair.generate(asking(n, 6), context)

    async def read() -> None:
        async for chunk in chunks:
            seen.append(chunk)
            if leaves == "closes" and len(seen) == after_chunks:
                return

    reader = asyncio.create_task(read())
    for _ in range(after_ticks if leaves in ("stops", "is cancelled") else 0):
        await asyncio.sleep(0)
    if leaves == "stops":
        context.stop()
    elif leaves == "is cancelled":
        reader.cancel()
    (outcome,) = await asyncio.gather(reader, return_exceptions=True)
    await chunks.aclose()
    await pair.idle()

    assert await leftover_tasks() == set()
    if strategy != "router":  # there, handoffs end with their leases
        assert len(LLM.kv_store) == 0
    for index in range(n):
        tokens = tokens_of(of_choice(index, seen))
        assert tokens == expected_tokens(len(tokens))
    if leaves == "never" and fails_at is None:
        assert outcome is None
        assert len(tokens_of(seen)) == 6 * n
