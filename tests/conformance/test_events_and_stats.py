"""What an engine tells the router, and how it ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.api import (
    IS_EMBEDDED,
    MAX_BATCH_SIZE,
    MAX_SEQ_LEN,
    PROMPT,
    TOKENS_PER_BLOCK,
    find,
    needs_a_model,
    sampling,
)
from tests.conformance.conftest import MakeLlm

#: Of one iteration, whatever runs.
STATS = {
    "timestamp": str,
    "iter": int,
    "iterLatencyMS": float,
    "numNewActiveRequests": int,
    "numActiveRequests": int,
    "numQueuedRequests": int,
    "numCompletedRequests": int,
    "maxNumActiveRequests": int,
    "maxBatchSizeStatic": int,
    "maxNumTokensStatic": int,
}
KV_CACHE_STATS = {
    "maxNumBlocks": int,
    "freeNumBlocks": int,
    "usedNumBlocks": int,
    "tokensPerBlock": int,
    "allocTotalBlocks": int,
    "allocNewBlocks": int,
    "reusedBlocks": int,
    "missedBlocks": int,
    "cacheHitRate": float,
}
#: Dynamo's forward-pass metrics need all from numCtxKvTokens on.
INFLIGHT_STATS = {
    "numScheduledRequests": int,
    "numContextRequests": int,
    "numGenRequests": int,
    "numPausedRequests": int,
    "numCtxTokens": int,
    "microBatchId": int,
    "avgNumDecodedTokensPerIter": float,
    "numCtxKvTokens": int,
    "numGenKvTokens": int,
    "numQueuedContextRequests": int,
    "numQueuedCtxTokens": int,
    "numQueuedGenRequests": int,
    "numQueuedGenKvTokens": int,
    "numPausedKvTokens": int,
}


async def drain(records: Any) -> list[dict[str, Any]]:
    return [record if isinstance(record, dict) else json.loads(record) async for record in records]


async def events_of(llm: Any, prompt: list[int], **more: Any) -> list[dict[str, Any]]:
    """Of one request, after those of all before it."""
    await drain(llm.get_kv_cache_events_async(timeout=0.5))
    await llm.generate_async(prompt, sampling(max_tokens=1), **more)
    return await drain(llm.get_kv_cache_events_async(timeout=5))


def stored(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole blocks, each with its parent's hash; TensorRT-LLM tells of parts of blocks, too."""
    blocks = []
    for event in events:
        if event["data"]["type"] != "stored":
            continue
        parent = event["data"]["parent_hash"]
        for block in event["data"]["blocks"]:
            assert block["type"] == "stored_block"
            assert 0 < len(block["tokens"]) <= TOKENS_PER_BLOCK
            if len(block["tokens"]) == TOKENS_PER_BLOCK:
                blocks.append(block | {"parent": parent})
            parent = block["block_hash"]
    return blocks


# -- KV events


async def test_events_are_numbered_without_gaps(llm: Any) -> None:
    events = await events_of(llm, [41, *PROMPT])
    events += await events_of(llm, [42, *PROMPT])
    ids = [event["event_id"] for event in events]
    assert all(isinstance(event["window_size"], int) for event in events)
    assert all(isinstance(event["data"], dict) for event in events)
    assert ids == sorted(set(ids))


async def test_full_blocks_of_a_prompt_are_stored_in_a_chain(llm: Any) -> None:
    prompt = [43, *PROMPT]
    blocks = stored(await events_of(llm, prompt))
    assert len(blocks) == len(prompt) // TOKENS_PER_BLOCK
    assert blocks[0]["parent"] is None
    assert blocks[1]["parent"] == blocks[0]["block_hash"]
    tokens = [token for block in blocks for token in block["tokens"]]
    assert [token["token_id"] for token in tokens] == prompt[: len(tokens)]
    for block in blocks:
        assert 0 <= block["block_hash"] < 2**64
        assert block["cache_level"] == 0
        assert isinstance(block["priority"], int)
        assert {(token["type"], token["token_extra_id"]) for token in block["tokens"]} == {
            ("unique_token", 0)
        }


async def test_a_known_prefix_is_not_stored_again(llm: Any) -> None:
    prompt = [44, *PROMPT]
    first = stored(await events_of(llm, prompt))
    longer = stored(
        await events_of(llm, prompt[: 2 * TOKENS_PER_BLOCK] + list(range(5, 5 + TOKENS_PER_BLOCK)))
    )
    assert [block["parent"] for block in longer] == [first[1]["block_hash"]]


async def test_stored_event_of_a_salted_block_has_its_salt(llm: Any) -> None:
    """Otherwise the router would apply it to every salt."""
    prompt = [45, *PROMPT]
    salted = stored(await events_of(llm, prompt, cache_salt="tenant"))
    plain = stored(await events_of(llm, prompt))
    assert [block["cache_salt"] for block in salted] == ["tenant"] * len(salted)
    assert not any(block.get("cache_salt") for block in plain)
    assert not {b["block_hash"] for b in salted} & {b["block_hash"] for b in plain}


async def test_evicted_blocks_are_removed(llm: Any) -> None:
    capacity = llm.get_kv_cache_capacity()["maxNumBlocks"]
    prompts = [[50 + i % 40, i // 40 + 5, *range(5, 205)] for i in range(capacity // 6 + 2)]
    await drain(llm.get_kv_cache_events_async(timeout=0.5))
    for prompt in prompts:
        await llm.generate_async(prompt, sampling(max_tokens=1))
    events = await drain(llm.get_kv_cache_events_async(timeout=5))
    known = {block["block_hash"] for block in stored(events)}
    removed = [event["data"]["block_hashes"] for event in events if event["data"]["type"] == "removed"]
    assert removed
    assert known & {block for hashes in removed for block in hashes}


async def test_a_new_engine_begins_with_created(make_llm: MakeLlm) -> None:
    """And this one's end: no request after shutdown, and a second shutdown is harmless."""
    llm = make_llm(cache_transceiver_config=None)
    await llm.generate_async(PROMPT, sampling(max_tokens=1))
    first = (await drain(llm.get_kv_cache_events_async(timeout=5)))[0]
    assert first["event_id"] == 0
    assert first["data"]["type"] == "created"
    levels = first["data"]["num_blocks_per_cache_level"]
    assert levels[0] == llm.get_kv_cache_capacity()["maxNumBlocks"]

    llm.shutdown()
    with pytest.raises(RuntimeError, match="LLM is shutting down"):
        llm.generate_async(PROMPT, sampling())
    assert not llm._check_health()
    llm.shutdown()


# -- statistics


async def stats_of(llm: Any, prompt: list[int], max_tokens: int) -> list[dict[str, Any]]:
    await drain(llm.get_stats_async(timeout=0.5))
    await llm.generate_async(prompt, sampling(max_tokens=max_tokens))
    return await drain(llm.get_stats_async(timeout=5))


def assert_has(record: dict[str, Any], fields: dict[str, type]) -> None:
    for name, kind in fields.items():
        assert name in record
        assert isinstance(record[name], (int, float) if kind is float else kind), name


async def test_every_iterations_statistics_have_all_fields(llm: Any) -> None:
    stats = await stats_of(llm, [61, *PROMPT], max_tokens=6)
    assert stats
    for stat in stats:
        assert_has(stat, STATS)
        assert_has(stat["kvCacheStats"], KV_CACHE_STATS)
        assert_has(stat["inflightBatchingStats"], INFLIGHT_STATS)
    iterations = [stat["iter"] for stat in stats]
    assert iterations == sorted(set(iterations))


async def test_statistics_of_one_request_add_up_to_its_tokens(llm: Any) -> None:
    prompt = [247, *PROMPT]
    stats = await stats_of(llm, prompt, max_tokens=6)
    inflight = [stat["inflightBatchingStats"] for stat in stats]
    assert sum(stat["numCtxTokens"] for stat in inflight) == len(prompt)
    assert sum(stat["numNewActiveRequests"] for stat in stats) == 1
    assert sum(stat["numCompletedRequests"] for stat in stats) == 1
    assert max(stat["numGenRequests"] for stat in inflight) == 1
    for stat in stats:
        blocks = stat["kvCacheStats"]
        assert blocks["usedNumBlocks"] + blocks["freeNumBlocks"] == blocks["maxNumBlocks"]
        assert 0 <= blocks["cacheHitRate"] <= 1
        assert stat["maxBatchSizeStatic"] == MAX_BATCH_SIZE


def test_the_capacity_has_room_for_the_longest_sequence(llm: Any) -> None:
    capacity = llm.get_kv_cache_capacity()
    assert capacity["tokensPerBlock"] == TOKENS_PER_BLOCK
    assert capacity["maxNumBlocks"] * TOKENS_PER_BLOCK >= MAX_SEQ_LEN


def test_blocking_calls_give_lists(llm: Any) -> None:
    llm.generate(PROMPT, sampling(max_tokens=2))
    assert isinstance(list(llm.get_stats(timeout=2)), list)
    assert isinstance(list(llm.get_kv_cache_events(timeout=2)), list)


# -- adapters


@pytest.mark.skipif(not IS_EMBEDDED, reason="TensorRT-LLM serves adapters")
@pytest.mark.parametrize("name", ["lora_request", "prompt_adapter_request"])
async def test_an_adapter_is_refused_by_name(llm: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        llm.generate_async(PROMPT, sampling(), **{name: object()})


@pytest.mark.skipif(not IS_EMBEDDED, reason="TensorRT-LLM serves adapters")
@pytest.mark.parametrize(
    "values",
    [{"enable_lora": True}, {"lora_config": {"max_lora_rank": 8}}, {"peft_cache_config": {}}],
    ids=str,
)
def test_an_llm_with_adapters_is_refused_by_name(make_llm: MakeLlm, values: dict[str, Any]) -> None:
    from trtllm_disagg.errors import ConfigError

    with pytest.raises(ConfigError, match=next(iter(values))):
        make_llm(**values)


@needs_a_model
@pytest.mark.skipif(not IS_EMBEDDED, reason="TensorRT-LLM serves both")
def test_a_guide_library_that_is_not_there_is_refused_by_name(make_llm: MakeLlm) -> None:
    from trtllm_disagg.errors import ConfigError

    with pytest.raises(ConfigError, match=r"guided_decoding_backend: 'xgrammar'.*llguidance"):
        make_llm(guided_decoding_backend="xgrammar")


def test_request_errors_are_exceptions() -> None:
    assert issubclass(find("RequestError"), Exception)
