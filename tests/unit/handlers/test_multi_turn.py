"""Conversations over real embedded engines: what each turn computes, and that its answer is that of one worker."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from tests.conftest import Checkpoints
from tests.support.engine_pair import both_idle, open_engines, two_stages
from tests.support.handling import ORDERS, collect, joined, request, tokens_of, until
from tests.support.recording_pair import recording_engine
from tests.support.sinks import IndexListener, events_for
from tests.support.stage_client import FakeContext, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engines.embedded.ipc import sockets
from trtllm_disagg.engines.embedded.kv_transfer.base import prompt_digest
from trtllm_disagg.errors import ConfigError, PeerUnavailableError, RequestCancelledError
from trtllm_disagg.handlers.multi_turn import PullBack
from trtllm_disagg.handlers.services import LiveState, build_generate, peers_of
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import kind_of
from trtllm_disagg.wire.kv_handle import VERSION, KvHandle

BLOCK, POOL_TOKENS = 16, 4096
FIRST, ANSWER, NEW = 50, 37, 13
NUM_TURNS = 8


@pytest.fixture(scope="module")
def engines(checkpoints: Checkpoints) -> Iterator[dict[Role, Engine]]:
    kv = {"max_tokens": POOL_TOKENS, "tokens_per_block": BLOCK, "event_buffer_max_size": 4096}
    with open_engines(checkpoints(), kv_cache_config=kv, enable_iter_perf_stats=True) as started:
        yield started


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
    engines: dict[Role, Engine], agg: Generate, order: str
) -> None:
    """New are the tokens after the last full block of the turn before; decode_first does this with a decider."""
    settings: dict[str, Any] = {"pull_min_tokens": 1}
    if order == "decode_first":
        settings = {"prefill_decider": "length", "thresholds": {"max_local_prefill_length": NEW + BLOCK}}
    config = WorkerConfig(model="m", role=Role.DECODE, strategy=order, **settings)
    live = LiveState.of(config, BLOCK)
    events = events_for(IndexListener(live.cached.of_rank(0)), BLOCK)
    generate, client = two_stages(engines, order, live, **settings)
    prompt, known = words(FIRST, 0), 0
    for number in range(NUM_TURNS):
        right = await collect(agg, turn(prompt, f"agg-{order}"))
        await prefilled(engines)
        answer = await collect(generate, asked := turn(prompt, order))
        await client.idle()
        assert bits(answer) == bits(right)
        assert joined(answer).completion_usage == joined(right).completion_usage
        first_stage_computes = order == "prefill_first" or number == 0
        computed = {Role.PREFILL: 0, Role.DECODE: 0}
        computed[Role.PREFILL if first_stage_computes else Role.DECODE] = len(prompt) - known
        assert await prefilled(engines) == computed
        if order == "decode_first":
            assert (asked.trace.strategy, len(client.calls)) == ("local" if number else order, 1)
        events.receive(engines[Role.DECODE].llm.get_kv_cache_events())
        known = known_after(prompt)
        prompt = prompt + tokens_of(answer) + words(NEW, number + 1)


# -- pulls that fail


def with_handle(opaque_state: bytes) -> TokenChunk:
    params = {"opaque_state": base64.b64encode(opaque_state).decode()}
    return TokenChunk([], finish_reason="length", disaggregated_params=params)


class SpoiledDecode:
    """A decode worker that answers all questions for its cache but the first one wrongly."""

    def __init__(self, decode: Generate, fault: str) -> None:
        self._decode = decode
        self._fault = fault
        self._used: list[TokenChunk] = []

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        is_question = request.phase_request is not None and request.phase_request.kind == "cached"
        if is_question and self._used:
            yield await self._spoiled(request, context)
            return
        async with aclosing(self._decode(request, context)) as chunks:
            async for chunk in chunks:
                if is_question:
                    self._used.append(chunk)
                yield chunk

    async def _spoiled(self, request: GenerateRequest, context: RequestContext) -> TokenChunk:
        match self._fault:
            case "used before":
                return self._used[0]
            case "of another prompt":
                other = msgspec.structs.replace(request, token_ids=words(FIRST, 99), cache_salt=None)
                return (await collect(self._decode, other))[0]
            case "unreadable":
                return with_handle(b"no handle")
            case "of a dead engine":
                size = len(request.token_ids) // BLOCK - 1
                prompt = request.token_ids[: size * BLOCK]
                handle = KvHandle(
                    version=VERSION,
                    sender="dead",
                    endpoint=f"unix://{sockets.directory()}/kv-1-1-dead",
                    lease=bytes(16),
                    layout=bytes(16),
                    prompt=prompt_digest(prompt, request.cache_salt or ""),
                    num_tokens=len(prompt),
                    blocks=list(range(size)),
                    seed=0,
                )
                return with_handle(handle.encode())
            case "no bytes":
                return TokenChunk([], finish_reason="length", disaggregated_params={"opaque_state": [1]})
        assert self._fault == "silent"
        await until(context.is_stopped)
        return TokenChunk([], finish_reason="cancelled")


FAULTS = ("used before", "of another prompt", "unreadable", "of a dead engine", "no bytes", "silent")


@pytest.mark.parametrize("fault", [*FAULTS, "gone", "evicted"])
async def test_what_cannot_be_pulled_is_computed_and_no_block_is_lost(
    engines: dict[Role, Engine], agg: Generate, fault: str
) -> None:
    generate, client = two_stages(engines, "prefill_first", pull_min_tokens=1)
    assert client.serve is not None
    alone = build_generate(
        WorkerConfig(model="m", role=Role.AGG), engines[Role.DECODE], RecordingStageClient()
    )
    await collect(alone, turn(words(FIRST, 99), ""))
    client.serve_by(SpoiledDecode(client.serve, fault))
    first = words(FIRST, 20)
    second = first + tokens_of(await collect(generate, turn(first, fault))) + words(NEW, 21)
    third = second + tokens_of(await collect(generate, turn(second, fault))) + words(NEW, 22)
    if fault == "gone":
        client.instance_id += 1
    if fault == "evicted":
        for number in range(POOL_TOKENS // 400 + 1):
            await collect(alone, turn(words(400, 30 + number), f"other {number}", max_tokens=1))
    # Of the last answer agg computes what decode steps have computed here, and in turn.
    await collect(agg, turn(first, f"agg {fault}"))
    await collect(agg, turn(second, f"agg {fault}", max_tokens=1))
    right = await collect(agg, turn(third, f"agg {fault}"))
    await prefilled(engines)
    answer = await collect(generate, asked := turn(third, fault))
    await client.idle()
    assert tokens_of(answer) == tokens_of(right)
    # Prefill's; decode still has KV of its own of the last answer, unless that is evicted.
    count = None if fault == "evicted" else 1
    assert [part[:count] for part in bits(answer)] == [part[:count] for part in bits(right)]
    assert asked.trace.fallbacks == []
    num_known = len(second) // BLOCK * BLOCK
    assert (await prefilled(engines))[Role.PREFILL] == len(third) - num_known


# -- when and whom


async def test_a_pulling_client_that_leaves_frees_both_engines(engines: dict[Role, Engine]) -> None:
    generate, client = two_stages(engines, "prefill_first", pull_min_tokens=1)
    prompt = words(FIRST, 50)
    prompt = prompt + tokens_of(await collect(generate, turn(prompt, "leaves"))) + words(NEW, 51)
    context = FakeContext()
    pulling = asyncio.create_task(collect(generate, turn(prompt, "leaves"), context))
    await until(lambda: kind_of(client.requests[-1]) == "cached")
    context.stop()
    with pytest.raises(RequestCancelledError):
        await pulling
    await client.idle()
    await prefilled(engines)


def made(
    prompt: list[int], answer: list[int], most_blocks: int = 100
) -> tuple[PullBack, RecordingStageClient]:
    client = RecordingStageClient(error=PeerUnavailableError("asked"))
    config = WorkerConfig(model="m", role=Role.PREFILL, strategy="prefill_first")
    pull = PullBack(peers_of(config, client), BLOCK, 2 * BLOCK, most_blocks)
    pull.remember(turn(prompt, "salt"), answer, client.instance_id)
    return pull, client


@pytest.mark.parametrize(
    ("prompt", "salt", "is_asked"),
    [
        ([*words(80, 1), 5], "salt", True),
        (words(80, 1), "salt", False),  # the block of its last token is computed
        ([*words(64, 1), 5], "salt", False),  # one block of the answer
        ([*words(80, 1), 5], "other", False),
        ([*words(79, 1), 5, 5], "salt", False),
    ],
)
async def test_the_worker_that_made_two_blocks_of_the_prompt_is_asked(
    prompt: list[int], salt: str, is_asked: bool
) -> None:
    """The answer's first block, with the end of its prompt, counts."""
    pull, client = made(words(50, 1), words(81, 1)[50:])
    asked = turn(prompt, salt)
    assert await pull(asked, FakeContext()) == asked
    assert len(client.calls) == is_asked


async def test_answers_that_are_too_many_are_forgotten_oldest_first() -> None:
    pull, client = made(words(50, 1), words(81, 1)[50:], most_blocks=2)
    pull.remember(turn(words(50, 2), "salt"), words(81, 2)[50:], client.instance_id)
    for seed, is_asked in ((1, False), (2, True)):
        await pull(turn([*words(80, seed), 5], "salt"), FakeContext())
        assert len(client.calls) == is_asked


def test_an_engine_that_cannot_is_refused_by_name_where_it_is_asked_to() -> None:
    def build(**settings: Any) -> Any:
        config = WorkerConfig(model="m", role=Role.PREFILL, strategy="prefill_first", **settings)
        return build_generate(config, recording_engine(), RecordingStageClient())

    build()
    build(pull_min_tokens=0)
    with pytest.raises(ConfigError, match=r"--pull-min-tokens: 1 .* 0 with .*, which cannot hand out"):
        build(pull_min_tokens=1)
