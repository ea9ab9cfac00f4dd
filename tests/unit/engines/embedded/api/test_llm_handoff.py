"""Disaggregation through the LLM API, between two engine processes over NIXL; and what engines say of themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoints
from trtllm_disagg.engines.embedded import (
    LLM,
    DisaggregatedParams,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from trtllm_disagg.engines.embedded.api.result import Logprob
from trtllm_disagg.engines.embedded.params.request_params import DisaggScheduleStyle

BLOCK = 32
NUM_BLOCKS = 64
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=11, logprobs=2)


def start(checkpoints: Checkpoints) -> LLM:
    return LLM(
        checkpoints(),
        kv_cache_config={"max_tokens": NUM_BLOCKS * BLOCK, "event_buffer_max_size": 1000},
        cache_transceiver_config={"backend": "DEFAULT", "kv_transfer_timeout_ms": 20_000},
        max_seq_len=512,
        max_batch_size=8,
        enable_iter_perf_stats=True,
    )


@pytest.fixture(scope="module")
def prefill(checkpoints: Checkpoints) -> Iterator[LLM]:
    with start(checkpoints) as llm:
        yield llm


@pytest.fixture(scope="module")
def decode(checkpoints: Checkpoints) -> Iterator[LLM]:
    with start(checkpoints) as llm:
        yield llm


def prompt(salt: int, num_tokens: int = 2 * BLOCK + 3) -> list[int]:
    return [2 + (salt * 41 + i * 7 + i * i) % 250 for i in range(num_tokens)]


async def run_prefill(llm: LLM, tokens: list[int], params: SamplingParams = PARAMS) -> RequestOutput:
    kind = DisaggregatedParams(request_type="context_only", disagg_request_id=1 << 41)
    result: RequestOutput = await llm.generate_async(tokens, params, disaggregated_params=kind)
    return result


def to_decode(result: RequestOutput, **changes: Any) -> DisaggregatedParams:
    params = result.outputs[0].disaggregated_params
    assert params is not None
    return dataclasses.replace(params, request_type="generation_only", **changes)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        # What the engine's process says of itself comes without an event.
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def no_leases(llm: LLM) -> bool:
    return llm.num_active_requests == 0


# -- the handoff


async def test_without_logprobs_of_the_first_token_the_others_keep_their_places(
    prefill: LLM, decode: LLM
) -> None:
    tokens = prompt(21)
    whole = (await prefill.generate_async(tokens, PARAMS)).outputs[0]
    handoff = to_decode(await run_prefill(prefill, tokens))
    handoff = dataclasses.replace(handoff, first_gen_log_probs=None)
    output = (await decode.generate_async(tokens, PARAMS, disaggregated_params=handoff)).outputs[0]
    assert output.token_ids == whole.token_ids
    assert output.logprobs == [{}, *whole.logprobs[1:]]
    await eventually(lambda: no_leases(prefill))


# -- what is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"opaque_state": None}, "needs opaque_state"),
        ({"opaque_state": b""}, "needs opaque_state"),
        ({"first_gen_tokens": None}, "exactly one of first_gen_tokens"),
        ({"first_gen_tokens": [1, 2]}, "exactly one of first_gen_tokens"),
        ({"first_gen_tokens": [9999]}, "first_gen_tokens holds 9999"),
        ({"first_gen_tokens": [True]}, "first_gen_tokens holds True"),
        ({"first_gen_log_probs": [{}]}, "first_gen_log_probs holds {}"),
        ({"first_gen_log_probs": [[]]}, r"first_gen_log_probs holds \[\]"),
        ({"first_gen_log_probs": [{5: {"logprob": 0.0}}]}, "first_gen_log_probs holds"),
        ({"first_gen_log_probs": [{5: Logprob(True)}]}, "value of the wrong type"),
        ({"first_gen_log_probs": [{5: Logprob(-1.0, rank=1.5)}]}, "value of the wrong type"),  # type: ignore[arg-type]
        ({"first_gen_log_probs": [{1 << 64: Logprob(-1.0)}]}, "value of the wrong type"),
        ({"first_gen_log_probs": [{"5": Logprob(-1.0)}]}, "value of the wrong type"),
        (
            {"schedule_style": DisaggScheduleStyle.GENERATION_FIRST, "disagg_request_id": True},
            "needs disagg_request_id in .* got True",
        ),
    ],
    ids=repr,
)
def test_incomplete_handoff_is_refused_at_once(decode: LLM, changes: dict[str, Any], reason: str) -> None:
    whole = DisaggregatedParams(request_type="generation_only", opaque_state=b"x", first_gen_tokens=[5])
    with pytest.raises(ValueError, match=reason):
        decode.generate_async([5], disaggregated_params=dataclasses.replace(whole, **changes))
    assert len(decode._running) == 0


# -- what an engine says of itself


async def test_kv_cache_capacity_is_that_of_the_pool(prefill: LLM) -> None:
    assert prefill.get_kv_cache_capacity() == {"maxNumBlocks": NUM_BLOCKS, "tokensPerBlock": BLOCK}
    assert (prefill.kv_transport, prefill.kv_pairing) == ("NIXL", "NIXL, handles of version 1")


def steps_of(llm: LLM) -> list[dict[str, Any]]:
    """Without those in which nothing ran: a handoff was fetched, say."""
    return [step for step in llm.get_stats() if step["inflightBatchingStats"]["numScheduledRequests"]]


async def test_statistics_count_tokens_and_blocks_of_both_phases(prefill: LLM, decode: LLM) -> None:
    tokens = prompt(9)
    prefill.get_stats()
    decode.get_stats()
    handoff = to_decode(await run_prefill(prefill, tokens))
    await decode.generate_async(tokens, PARAMS, disaggregated_params=handoff)
    (first,) = steps_of(prefill)
    batch, pool = first["inflightBatchingStats"], first["kvCacheStats"]
    assert (batch["numContextRequests"], batch["numGenRequests"], batch["numCtxTokens"]) == (
        1,
        0,
        len(tokens),
    )
    assert (pool["maxNumBlocks"], pool["tokensPerBlock"]) == (NUM_BLOCKS, BLOCK)
    assert pool["usedNumBlocks"] + pool["freeNumBlocks"] == NUM_BLOCKS
    assert pool["usedNumBlocks"] >= 3, "leased blocks are in use"
    steps = steps_of(decode)
    assert [step["inflightBatchingStats"]["numContextRequests"] for step in steps] == [0] * 11
    assert all(step["inflightBatchingStats"]["numGenRequests"] == 1 for step in steps)
    assert steps[-1]["totals"]["kvPulls"] >= 1
    iterations = [step["iter"] for step in steps]
    assert iterations == sorted(set(iterations))
    assert first.keys() >= {"timestamp", "iterLatencyMS", "numActiveRequests", "numQueuedRequests"}


# -- the end


async def test_killed_engine_fails_only_its_own_requests_and_handoffs(
    checkpoints: Checkpoints, decode: LLM
) -> None:
    doomed = start(checkpoints)
    try:
        handoffs = [to_decode(await run_prefill(doomed, prompt(20 + i))) for i in range(2)]
        await decode.generate_async(prompt(20), PARAMS, disaggregated_params=handoffs[0])
        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        streamed = doomed.generate_async([5], endless, streaming=True)
        await anext(streamed)
        blocked = asyncio.create_task(asyncio.to_thread(doomed.generate_async([6], endless).result))
        assert doomed._check_health()
        os.kill(doomed.engine_pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="exit code -9"):  # at once, or when it is found out
                await doomed.generate_async([7])
            with pytest.raises(RequestError, match="the engine process ended with exit code -9") as error:
                async for _ in streamed:
                    pass
            assert error.value.category == "Unavailable"
            with pytest.raises(RequestError, match="exit code -9"):
                await blocked
            with pytest.raises(RequestError) as error:
                await decode.generate_async(prompt(21), PARAMS, disaggregated_params=handoffs[1])
            assert error.value.category == "Unavailable"
        assert not doomed._check_health()
        assert not is_process(doomed.engine_pid), "reaped before its exit is asked for"
        with pytest.raises(RuntimeError, match="exit code -9"):
            doomed.generate_async([5])
        streamed.abort()
    finally:
        doomed.shutdown()
    assert (await decode.generate_async(prompt(21), PARAMS)).outputs[0].finish_reason == "length"
    await eventually(lambda: no_leases(decode))


def is_process(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
