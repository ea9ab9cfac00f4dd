"""Conversations in prefill_first: what each turn computes, and that its answer is that of one worker."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from tests.conftest import Checkpoints
from tests.support.day_one import kinds, opened
from tests.support.engine_pair import both_idle, following, open_engines, two_stages
from tests.support.handling import ORDERS, collect, joined, request, tokens_of, until
from tests.support.mounted_recording import mounted_recording_llm
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engines.embedded.ipc import sockets
from trtllm_disagg.engines.embedded.kv_transfer.base import prompt_digest
from trtllm_disagg.engines.recording.hard_edges import PESSIMISTIC
from trtllm_disagg.errors import ConfigError, EngineError
from trtllm_disagg.handlers.chain import PrefillService
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.handlers.local import LocalPrefill
from trtllm_disagg.handlers.multi_turn import PrefillOfCached
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.types import Generate, GenerateRequest, PhaseRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import phase_of
from trtllm_disagg.wire.kv_handle import VERSION, KvHandle

BLOCK, POOL_TOKENS = 16, 8192
FIRST, ANSWER, NEW = 50, 37, 13
NUM_TURNS = 20


@pytest.fixture(scope="module")
def engines(checkpoints: Checkpoints) -> Iterator[dict[Role, Engine]]:
    kv = {"max_tokens": POOL_TOKENS, "tokens_per_block": BLOCK, "event_buffer_max_size": 4096}
    with open_engines(
        checkpoints(), kv_cache_config=kv, enable_iter_perf_stats=True, max_seq_len=1100
    ) as started:
        yield started


@pytest.fixture
async def live(engines: dict[Role, Engine]) -> AsyncIterator[LiveState]:
    """Decode's."""
    async with following(engines[Role.DECODE], BLOCK) as live:
        yield live


@pytest.fixture
def agg(engines: dict[Role, Engine]) -> Generate:
    return build_generate(
        WorkerConfig(model="m", role=Role.AGG), engines[Role.PREFILL], RecordingStageClient()
    )


def words(count: int, seed: int) -> list[int]:
    return [2 + (i * 7 + i * i * (seed + 3) + 11 * seed) % 250 for i in range(count)]


def turn(prompt: list[int], salt: str, max_tokens: int = ANSWER) -> GenerateRequest:
    return request(
        token_ids=prompt,
        stop_conditions={"max_tokens": max_tokens, "ignore_eos": True},
        sampling_options={"temperature": 0.0},
        output_options={"logprobs": 2},
        routing={"cache_salt": salt},
    )


def bits(chunks: list[TokenChunk]) -> tuple[Any, ...]:
    chunk = joined(chunks)
    return chunk.token_ids, chunk.log_probs, chunk.top_logprobs


async def prefilled(engines: dict[Role, Engine]) -> dict[Role, int]:
    """Tokens since the last look. Waits until every block of both is free, or known and without a user."""
    await both_idle(engines)
    counted = {}
    for role, engine in engines.items():
        stats: list[dict[str, Any]] = []

        def has_no_block_in_use(llm: Any = engine.llm, stats: list[dict[str, Any]] = stats) -> bool:
            stats += llm.get_stats()
            return not stats or stats[-1]["kvCacheStats"]["usedNumBlocks"] == 0

        await until(has_no_block_in_use)
        counted[role] = sum(each["inflightBatchingStats"]["numCtxTokens"] for each in stats)
    return counted


def known_after(prompt: list[int]) -> int:
    """Tokens in full blocks after a turn. The KV of the answer's last token is never computed."""
    return (len(prompt) + ANSWER - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("order", ORDERS)
async def test_each_turn_computes_its_new_tokens_and_gives_aggs_bits(
    engines: dict[Role, Engine], agg: Generate, live: LiveState, order: str
) -> None:
    """New are the tokens after the last full block of the turn before; decode_first does this with a decider. Decode
    computes one token of what it hands back.
    """
    settings: dict[str, Any] = {"pull_min_tokens": 1}
    if order == "decode_first":
        settings = {"prefill_decider": "length"}
        live.set_thresholds({"max_local_prefill_length": NEW + BLOCK}, "test")
    generate, client = two_stages(engines, order, live, **settings)
    prompt, known = words(FIRST, 0), 0
    for number in range(NUM_TURNS):
        right = await collect(agg, turn(prompt, f"agg-{order}"))
        await prefilled(engines)
        answer = await collect(generate, asked := turn(prompt, order))
        assert bits(answer) == bits(right)
        assert joined(answer).completion_usage == joined(right).completion_usage
        await until(lambda: not num_in_background())
        computed = await prefilled(engines)
        if order == "prefill_first":
            assert computed == {Role.PREFILL: len(prompt) - known, Role.DECODE: 1}
        else:
            assert sum(computed.values()) == len(prompt) - known
            assert (asked.trace.strategy, len(client.calls)) == ("local" if number else order, 1)
            told = [*prompt, *tokens_of(answer), 0], order
            await until(lambda: live.cached.num_cached(*told) >= known_after(prompt))  # noqa: B023
        known = known_after(prompt)
        prompt = prompt + tokens_of(answer) + words(NEW, number + 1)


async def test_a_turn_that_comes_at_once_waits_for_the_answer_before_it(
    engines: dict[Role, Engine], live: LiveState
) -> None:
    generate, _ = two_stages(engines, "prefill_first", live, pull_min_tokens=1)
    first = words(FIRST, 10)
    second = first + tokens_of(await collect(generate, turn(first, "at once"))) + words(NEW, 11)
    assert num_in_background() == 1
    usage = joined(await collect(generate, turn(second, "at once", max_tokens=1))).completion_usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == known_after(first)


async def test_an_engine_with_tensorrt_llms_hard_edges_pulls_by_ordinary_calls() -> None:
    with mounted_recording_llm(PESSIMISTIC):
        kv = {"event_buffer_max_size": 1024}
        pair = {
            role: opened(kv_cache_config=kv, max_seq_len=2048, max_num_tokens=512)
            for role in (Role.PREFILL, Role.DECODE)
        }
        async with following(pair[Role.DECODE], block_size := 32) as live:
            generate, client = two_stages(
                pair, "prefill_first", live, engine="tensorrt_llm", pull_min_tokens=1
            )
            prompt, known = words(FIRST, 0), 0
            for number in range(5):
                asked = request(token_ids=prompt, stop_conditions={"max_tokens": 2 * block_size})
                answer = await collect(generate, asked)
                await until(lambda: not num_in_background())
                await client.idle()
                (computed,) = [
                    each for each in pair[Role.PREFILL].llm.results if each.prompt_token_ids == prompt
                ]
                assert computed.cached_tokens == known
                known = (len(prompt) + 2 * block_size - 1) // block_size * block_size
                prompt = prompt + tokens_of(answer) + words(NEW, number + 1)
        of_turn = {
            Role.PREFILL: ["context_only", "generation_only"],
            Role.DECODE: ["generation_only", "context_only"],
        }
        for role, engine in pair.items():
            assert kinds(engine.llm) == 5 * of_turn[role]
            assert engine.llm.held_contexts == 0


# -- pulls that fail


def handed_back(opaque_state: bytes) -> TokenChunk:
    params = {"opaque_state": base64.b64encode(opaque_state).decode(), "first_gen_tokens": [5]}
    return TokenChunk([5], finish_reason="length", disaggregated_params=params)


class SpoiledDecode:
    """A decode worker that hands back the first answer, and no later one."""

    def __init__(self, decode: Generate, fault: str) -> None:
        self._decode = decode
        self._fault = fault
        self._used: list[TokenChunk] = []
        self.speaks = asyncio.Event()

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        is_pull = request.phase_request is not None and request.phase_request.phase == "prefill"
        if is_pull and self._used:
            yield await self._spoiled(request)
            return
        async with aclosing(self._decode(request, context)) as chunks:
            async for chunk in chunks:
                if is_pull:
                    self._used.append(chunk)
                yield chunk

    async def _spoiled(self, request: GenerateRequest) -> TokenChunk:
        match self._fault:
            case "of another prompt":
                return self._used[0]
            case "unreadable":
                return handed_back(b"no handle")
            case "without a token":
                return msgspec.structs.replace(handed_back(b"no handle"), token_ids=[])
            case "of a dead engine":
                return handed_back(self._handle_of_the_dead(request).encode())
            case "failed":
                raise EngineError("scripted")
        assert self._fault == "silent"
        await self.speaks.wait()
        return handed_back(b"late")

    def _handle_of_the_dead(self, request: GenerateRequest) -> KvHandle:
        prompt = request.token_ids
        return KvHandle(
            version=VERSION,
            sender="dead",
            endpoint=f"unix://{sockets.directory()}/kv-1-1-dead",
            lease=bytes(16),
            layout=bytes(16),
            prompt=prompt_digest(prompt, request.cache_salt or ""),
            num_tokens=len(prompt),
            blocks=list(range(-(-len(prompt) // BLOCK))),
            seed=0,
        )


FAULTS = ("of another prompt", "unreadable", "without a token", "of a dead engine", "failed", "silent")


@pytest.mark.parametrize("fault", [*FAULTS, "gone", "not known as cached"])
async def test_what_cannot_be_pulled_is_computed_and_no_block_is_lost(
    engines: dict[Role, Engine], agg: Generate, live: LiveState, fault: str
) -> None:
    generate, client = two_stages(engines, "prefill_first", live, pull_min_tokens=1)
    assert client.serve is not None
    spoiled = SpoiledDecode(client.serve, fault)
    client.serve_by(spoiled)
    first = words(FIRST, 20)
    second = first + tokens_of(await collect(generate, turn(first, fault))) + words(NEW, 21)
    await until(lambda: not num_in_background())
    chunks = await collect(generate, turn(second, fault))
    if fault == "gone":
        client.instance_id += 1  # before the pull has begun
    if fault == "not known as cached":
        live.cached.of_rank(0).clear()
    third = second + tokens_of(chunks) + words(NEW, 22)
    # Of the last answer agg computes what decode steps have computed here, and in turn.
    await collect(agg, turn(first, f"agg {fault}"))
    await collect(agg, turn(second, f"agg {fault}", max_tokens=1))
    right = await collect(agg, turn(third, f"agg {fault}"))
    if fault != "silent":
        await until(lambda: not num_in_background())
    await prefilled(engines)
    answer = await collect(generate, asked := turn(third, fault))
    spoiled.speaks.set()
    await until(lambda: not num_in_background())
    await client.idle()
    assert tokens_of(answer) == tokens_of(right)
    # Prefill's; decode still has KV of its own of the last answer.
    assert [part[:1] for part in bits(answer)] == [part[:1] for part in bits(right)]
    assert asked.trace.fallbacks == []
    num_known = len(second) // BLOCK * BLOCK
    assert (await prefilled(engines))[Role.PREFILL] == len(third) - num_known


# -- when, and for which requests


@pytest.mark.parametrize(
    ("keys", "num_pulls"),
    [
        ({}, 1),
        ({"stop_conditions": {"max_tokens": 30}}, 0),  # of two blocks the last token's KV is missing
        ({"stop_conditions": {"max_tokens": 31}}, 1),
        (
            {"phase_request": {"phase": "whole", "strategy": "prefill_first"}},
            0,
        ),  # the next turn goes to its sender
    ],
)
async def test_long_answers_to_frontends_are_pulled(keys: dict[str, Any], num_pulls: int) -> None:
    """Of `FIRST` tokens the last two are in the first block of the answer."""
    engine = recording_engine(kv_cache_config={"tokens_per_block": BLOCK})
    decode = WorkerConfig(model="m", role=Role.DECODE, strategy="prefill_first")
    client = RecordingStageClient(build_generate(decode, engine, RecordingStageClient()))
    prefill = WorkerConfig(model="m", role=Role.PREFILL, strategy="prefill_first", pull_min_tokens=2 * BLOCK)
    generate = build_generate(prefill, engine, client)
    asked = {"token_ids": words(FIRST, 1), "stop_conditions": {"max_tokens": ANSWER}} | keys
    await collect(generate, request(**asked))
    await until(lambda: not num_in_background())
    assert [phase_of(each) for each in client.requests] == ["decode"] + ["prefill"] * num_pulls


async def test_decode_computes_no_prompt_that_its_cache_does_not_hold(engines: dict[Role, Engine]) -> None:
    engine, prompt = engines[Role.DECODE], words(8 * BLOCK + 1, 60)
    alone = build_generate(WorkerConfig(model="m", role=Role.AGG), engine, RecordingStageClient())
    async with following(engine, BLOCK) as live:
        recalls = Recalls(lambda: [7], 60.0)
        service = PrefillService(PrefillOfCached(LocalPrefill(engine), live.cached, recalls), recalls)

        async def handed_out(count: int, attempt: str) -> bool:
            asked = turn(prompt[:count], "cached")
            phase = PhaseRequest("prefill", attempts=(attempt,), sender=7)
            asked = msgspec.structs.replace(asked, phase_request=phase)
            (chunk,) = await collect(service, asked)
            return chunk.disaggregated_params is not None

        await collect(alone, turn(prompt[: 4 * BLOCK + 1], "cached", max_tokens=1))
        assert await handed_out(6 * BLOCK, "two blocks more")
        assert not await handed_out(8 * BLOCK + 1, "four blocks more")
        for number in range(32):
            held = await handed_out(4 * BLOCK + 1, str(number))
            assert held == (number < 31), "as many as 32 wait"
        recalls.recall(["two blocks more", *map(str, range(32))])
    await prefilled(engines)


@pytest.mark.parametrize(
    "engine_args",
    [
        {"kv_cache_config": {"enable_block_reuse": False}},
        {"enable_attention_dp": True, "tensor_parallel_size": 2},
    ],
)
def test_an_engine_that_would_not_find_the_answer_is_refused_where_the_flag_is_given(
    engine_args: dict[str, Any],
) -> None:
    def build(**settings: Any) -> Any:
        config = WorkerConfig(model="m", role=Role.PREFILL, strategy="prefill_first", **settings)
        return build_generate(config, recording_engine(**engine_args), RecordingStageClient())

    build()
    build(pull_min_tokens=0)
    with pytest.raises(ConfigError, match=r"--pull-min-tokens: 1 .* 0 without .*enable_block_reuse"):
        build(pull_min_tokens=1)


def test_tensorrt_llm_pulls_only_when_it_is_told_to() -> None:
    def least(engine: str, **settings: Any) -> int:
        config = WorkerConfig(
            model="m", role=Role.DECODE, strategy="prefill_first", engine=engine, **settings
        )
        return config.pulls_from

    assert (least("tensorrt_llm"), least("tensorrt_llm", pull_min_tokens=200)) == (0, 200)
    assert (least("embedded"), least("embedded", pull_min_tokens=0)) == (96, 0)
