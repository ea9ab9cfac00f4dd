"""Every strategy gives the answer that one worker gives, and asks the engines for nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.handling import (
    ORDERS,
    PROMPT,
    STRATEGIES,
    collect,
    expected_tokens,
    joined,
    request,
    tokens_of,
    untraced,
)
from tests.support.recording_pair import make_pair, recording_engine
from tests.support.stage_client import FakeContext, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.llm import LLM, Script
from trtllm_disagg.engines.recording.result import EOS_TOKEN
from trtllm_disagg.errors import InvalidRequestError, PeerUnavailableError
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.strategies import run_by_workers, spec_of
from trtllm_disagg.types import GenerateRequest, TokenChunk, Usage

pytestmark = pytest.mark.usefixtures("no_leaks")

WITH_LOGPROBS: dict[str, Any] = {"output_options": {"logprobs": 2}}


async def answer_of_one_worker(asked: GenerateRequest, script: Script | None = None) -> list[TokenChunk]:
    engine = recording_engine()
    if script is not None:
        engine.llm.scripts.append(script)
    config = WorkerConfig(model="m", role=Role.AGG)
    return await collect(build_generate(config, engine, RecordingStageClient()), asked)


def request_types(llm: LLM) -> list[str]:
    return [result.request_type for result in llm.results]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_tokens", [1, 2, 5, None])
async def test_the_answer_of_a_pair_is_that_of_one_worker(strategy: str, max_tokens: int | None) -> None:
    asked = request(max_tokens, **WITH_LOGPROBS)
    whole = await answer_of_one_worker(asked)
    split = await collect(make_pair(strategy).generate, asked)
    assert tokens_of(split) == tokens_of(whole) == expected_tokens(max_tokens or 512 - len(PROMPT))
    assert untraced(joined(split)) == untraced(joined(whole))
    assert [chunk.finish_reason for chunk in split[:-1]] == [None] * (len(split) - 1)
    cached = [usage and usage.prompt_tokens_details for usage in (chunk.completion_usage for chunk in split)]
    assert cached[-1] is not None
    assert cached == [cached[-1], *[None] * (len(split) - 2), cached[-1]][-len(split) :]
    assert all(chunk.disaggregated_params is None for chunk in split)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("stop_conditions", "tokens", "stop_reason"),
    [
        ({"max_tokens": 5}, [EOS_TOKEN, 7], None),
        ({"max_tokens": 5, "stop_token_ids_hidden": [8]}, [8, 7], 8),
        ({"max_tokens": 5, "stop_token_ids": [8]}, [8, 7], 8),
    ],
)
async def test_a_stop_at_the_first_token_never_reaches_decode(
    strategy: str, stop_conditions: dict[str, Any], tokens: list[int], stop_reason: int | None
) -> None:
    pair = make_pair(strategy)
    pair.prefill.scripts.append(Script(tokens=tokens))
    asked = request(stop_conditions=stop_conditions)
    chunks = await collect(pair.generate, asked)
    (chunk,) = chunks
    (whole,) = await answer_of_one_worker(asked, Script(tokens=tokens))
    assert untraced(chunk) == untraced(whole)
    assert (chunk.finish_reason, chunk.stop_reason, chunk.token_ids) == ("stop", stop_reason, [])
    assert pair.decode.results == []
    assert pair.prefill.results[0].aborts == [0]


@pytest.mark.parametrize("order", ORDERS)
async def test_first_token_is_sent_before_decode_starts(order: str) -> None:
    pair = make_pair(order)
    chunks = pair.generate(request(**WITH_LOGPROBS), FakeContext())
    first = await anext(chunks)
    assert first.token_ids == expected_tokens(1)
    assert first.finish_reason is None
    assert first.log_probs == [-1.0]
    assert pair.decode.results == []
    assert len(LLM.kv_store) == 1
    rest = [chunk async for chunk in chunks]
    assert tokens_of(rest) == expected_tokens(5)[1:]


async def test_dynamos_router_asks_prefill_for_one_token_and_gets_it_from_decode() -> None:
    pair = make_pair("router")
    chunks = await collect(pair.generate, request(**WITH_LOGPROBS))
    assert pair.clients[0].requests[0]["stop_conditions"]["max_tokens"] == 1
    (prefilled,) = pair.clients[0].calls[0].answers
    assert prefilled["token_ids"] == expected_tokens(1)
    assert prefilled["finish_reason"] == "length"
    assert prefilled["disaggregated_params"]["first_gen_tokens"] == expected_tokens(1)
    assert chunks[0].token_ids[:1] == expected_tokens(1)
    assert (chunks[0].log_probs or [])[:1] == [-1.0]


@pytest.mark.parametrize("strategy", run_by_workers())
async def test_request_with_max_tokens_0_gets_only_a_finish_reason(strategy: str) -> None:
    """A frontend asks so for the end of an answer that lost its worker behind the last token."""
    pair = make_pair(strategy)
    asked = request(0)
    usage = Usage.of(len(asked.token_ids), 0, 0)
    end = TokenChunk([], finish_reason="length", completion_usage=usage)
    assert [untraced(chunk) for chunk in await collect(pair.generate, asked)] == [end]
    assert (asked.trace.strategy, asked.trace.reason) == ("local", "nothing_left")
    assert not pair.prefill.results
    assert not pair.decode.results


async def test_without_a_prefill_result_a_routed_decode_worker_does_it_all() -> None:
    pair = make_pair("router")
    asked = request(annotations=["x-bypass-remote-prefill"])
    answers = [answer async for answer in pair.client.call(asked.raw, FakeContext())]
    assert [token for answer in answers for token in answer["token_ids"]] == expected_tokens(5)
    assert request_types(pair.decode) == ["context_and_generation"]
    assert "disaggregated_params" not in pair.decode.calls_of("generate_async")[0]


async def test_a_second_stage_decode_worker_needs_a_prefill_result() -> None:
    config = WorkerConfig(model="m", role=Role.DECODE, strategy="prefill_first")
    generate = build_generate(config, recording_engine(), RecordingStageClient())
    with pytest.raises(InvalidRequestError, match="needs a prefill result"):
        await collect(generate, request(phase_request={"phase": "decode"}))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_forwarded_request_keeps_unknown_keys_and_the_original_is_unchanged(strategy: str) -> None:
    pair = make_pair(strategy)
    asked = request()
    before = copy.deepcopy(asked.raw)
    await collect(pair.generate, asked)
    assert asked.raw == before
    assert {call.context.id() for call in pair.client.calls} == {"request-1"}
    forwarded = pair.client.requests[0]
    prefill_result = forwarded.pop("prefill_result", None)
    phase_request = forwarded.pop("phase_request", None)
    forwarded.pop("errand", None)  # the same, of 0.2
    if phase_request is not None:
        phase_request.pop("attempts", None)
    assert forwarded == before
    first = spec_of(strategy).entry_role
    assert (
        phase_request == {"prefill": {"phase": "decode"}, "decode": {"phase": "prefill"}, None: None}[first]
    )
    assert (prefill_result is None) == (first == "decode")


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_usage_counts_what_prefill_had_cached(strategy: str) -> None:
    """Decode's engine would count the whole prompt, because all of it was transferred."""
    pair = make_pair(strategy)
    chunks = await collect(pair.generate, request())
    usage = chunks[-1].completion_usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert pair.decode.results[0].cached_tokens == len(PROMPT)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)


pytestmark = pytest.mark.usefixtures("no_leaks")

_WAYS = ("local", *run_by_workers())


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("prefill_first", ["disagg:sideways"]),
        ("decode_first", ["disagg:"]),
        ("prefill_first", ["disagg:strategy=local"]),
        ("decode_first", ["disagg:nxt=1a2b"]),
        ("prefill_first", ["disagg:next"]),
        ("decode_first", ["disagg:local", "disagg:sideways"]),
    ],
)
async def test_unknown_annotation_is_refused_with_the_allowed_ones(order: str, words: list[str]) -> None:
    """A misspelt wish must not be heard as none."""
    with pytest.raises(
        InvalidRequestError, match=f"nvext.annotations: {words[-1]!r} .*disagg:next="
    ) as caught:
        await collect(make_pair(order).generate, request(4, annotations=words))
    assert all(f"disagg:{name}" in str(caught.value) for name in _WAYS)


@pytest.mark.parametrize("order", ORDERS)
async def test_annotations_without_the_prefix_are_ignored(order: str) -> None:
    asked = request(4, annotations=["query_instance_id:", "disagg:local", "disagg:local"])
    assert tokens_of(await collect(make_pair(order).generate, asked)) == expected_tokens(4)
    assert asked.trace.strategy == "local"


@pytest.mark.parametrize("order", ORDERS)
async def test_unknown_strategy_asked_by_a_worker_raises_peer_unavailable(order: str) -> None:
    asked = request(4, phase_request={"phase": "whole", "strategy": "decode_twice"})
    with pytest.raises(PeerUnavailableError, match="does not know the strategy 'decode_twice'"):
        await collect(make_pair(order).generate, asked)
