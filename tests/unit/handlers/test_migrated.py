"""A request that a frontend has taken from a worker that died goes on as if it had never moved."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from tests.support.handling import PROMPT, collect, raw_request, request, tokens_of, untraced
from tests.support.trying import Unlimited, trying
from trtllm_disagg.handlers.delivered import Replays, always_replay, replay_if_needed
from trtllm_disagg.types import GenerateRequest, PhaseRequest, RequestContext, TokenChunk, Usage
from trtllm_disagg.wire.bodies import decode_request
from trtllm_disagg.wire.migration_link import MigrationLink

PENALTY = {"presence_penalty": 0.5}


class Worker:
    """Its tokens depend on the prompt's length and the seed only, and it remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        self.asked.append(request)
        count = request.stop.max_tokens or 0
        first = 1000 * len(request.token_ids) + (request.sampling.seed or 0)
        for position in range(count):
            last = position == count - 1
            usage = Usage.of(len(request.token_ids), count, 0) if last else None
            yield TokenChunk(
                [first + position], finish_reason="length" if last else None, completion_usage=usage
            )


def migrated(raw: dict[str, Any], chunks: list[TokenChunk]) -> GenerateRequest:
    """What the frontend makes of a request when its worker has died behind these chunks."""
    delivered = tokens_of(chunks)
    link = next(chunk.worker_trace_link for chunk in chunks if chunk.token_ids)
    stop = raw["stop_conditions"] | {"max_tokens": raw["stop_conditions"]["max_tokens"] - len(delivered)}
    changes = {"token_ids": raw["token_ids"] + delivered, "stop_conditions": stop, "migration_link": link}
    return decode_request(raw | changes, takes_images=True)


@pytest.mark.parametrize("sampling", [{"seed": 7}, {}, PENALTY], ids=["seeded", "drawn", "penalty"])
@pytest.mark.parametrize("count", [1, 3, 5])
async def test_migrated_request_continues_with_the_same_tokens(sampling: dict[str, Any], count: int) -> None:
    raw = raw_request(6, sampling_options=sampling)
    first, second = Worker(), Worker()
    whole = await collect(trying(first, always_replay), decode_request(raw))
    assert [chunk.worker_trace_link is None for chunk in whole] == [False, *[True] * 5]
    rest = await collect(trying(second, always_replay), migrated(raw, whole[:count]))
    assert tokens_of(whole[:count]) + tokens_of(rest) == tokens_of(whole)
    assert rest[-1].completion_usage == whole[-1].completion_usage == Usage.of(len(PROMPT), 6, 0)
    (asked,) = second.asked
    assert asked.token_ids == asked.raw["token_ids"] == PROMPT
    assert asked.raw["stop_conditions"]["max_tokens"] == asked.stop.max_tokens == 6
    assert asked.sampling == first.asked[0].sampling
    assert "migration_link" not in asked.raw


async def test_request_migrated_twice_continues_with_the_same_tokens() -> None:
    raw = raw_request(6, sampling_options={})
    whole = await collect(trying(Worker(), always_replay), decode_request(raw))
    once = await collect(trying(Worker(), always_replay), migrated(raw, whole[:2]))
    twice = await collect(trying(Worker(), always_replay), migrated(raw, [*whole[:2], *once[:2]]))
    # The frontend has the link of the worker that died last.
    assert once[0].worker_trace_link == whole[0].worker_trace_link
    assert tokens_of([*whole[:2], *once[:2], *twice]) == tokens_of(whole)


async def test_migrated_request_with_all_tokens_gets_only_its_end() -> None:
    raw = raw_request(3)
    whole = await collect(trying(Worker(), always_replay), decode_request(raw))
    lost = [*whole[:2], replace_end(whole[2])]
    worker = Worker()
    rest = await collect(trying(worker, always_replay), migrated(raw, lost))
    assert [untraced(each) for each in rest] == [
        TokenChunk([], finish_reason="length", completion_usage=Usage.of(len(PROMPT), 3, 0))
    ]
    assert worker.asked == []


def replace_end(chunk: TokenChunk) -> TokenChunk:
    return TokenChunk(chunk.token_ids, worker_trace_link=chunk.worker_trace_link)


async def test_inexact_engine_goes_on_behind_the_tokens_that_a_client_has() -> None:
    """Its usage, and its least number of tokens, are those of the whole answer."""
    raw = raw_request(6, sampling_options={}, stop_conditions={"max_tokens": 6, "min_tokens": 5})
    first, second = Worker(), Worker()
    whole = await collect(trying(first, replay_if_needed), decode_request(raw))
    rest = await collect(trying(second, replay_if_needed), migrated(raw, whole[:2]))
    (asked,) = second.asked
    assert asked.token_ids == asked.raw["token_ids"] == PROMPT + tokens_of(whole[:2])
    assert (asked.stop.max_tokens, asked.stop.min_tokens, asked.sampling.seed) == (4, 3, None)
    assert rest[-1].completion_usage == whole[-1].completion_usage == Usage.of(len(PROMPT), 6, 0)


@pytest.mark.parametrize("replays", [always_replay, replay_if_needed])
async def test_migrated_request_that_fills_the_engine_gets_only_its_end(replays: Replays) -> None:
    """Without max_tokens the engine's longest sequence ends an answer."""
    link = MigrationLink(len(PROMPT), 0).encode()
    asked = decode_request(raw_request(None, token_ids=[*PROMPT, 1, 2], migration_link=link))
    worker = Worker()
    (end,) = await collect(trying(worker, replays, Unlimited(limit=2)), asked)
    assert untraced(end) == TokenChunk(
        [], finish_reason="length", completion_usage=Usage.of(len(PROMPT), 2, 0)
    )
    assert worker.asked == []


@pytest.mark.parametrize(
    "link",
    [
        None,
        "text",
        {},
        {"trace_id": "a" * 32, "span_id": "b" * 16},
        MigrationLink(3, 0).encode() | {"span_id": "-00000000000003f"},
        MigrationLink(0, 0).encode(),
        MigrationLink(2**63, 0).encode(),
        {"trace_id": 5, "span_id": None},
    ],
)
async def test_invalid_migration_link_changes_nothing(link: Any) -> None:
    worker = Worker()
    asked = decode_request(raw_request(4, sampling_options={"seed": 1}, migration_link=link))
    await collect(trying(worker, always_replay), asked)
    assert worker.asked == [asked]


async def test_relayed_request_is_not_resumed_again() -> None:
    """It has been looked at there."""
    worker = Worker()
    asked = msgspec.structs.replace(
        request(4, sampling_options={}), phase_request=PhaseRequest("whole", "decode_first")
    )
    chunks = await collect(trying(worker, always_replay), asked)
    assert worker.asked == [asked]
    assert {chunk.worker_trace_link is None for chunk in chunks} == {True}
