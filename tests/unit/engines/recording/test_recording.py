"""The recording engine of worker processes: both orders give the tokens of one engine, at its pace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.handling import collect, expected_tokens, request, tokens_of
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engines.recording import llm as recording
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.types import Generate

pytestmark = pytest.mark.usefixtures("no_leaks")


def engine(**recording: Any) -> Engine:
    args = {"model": "org/model", "recording": recording, "cache_transceiver_config": {"backend": "DEFAULT"}}
    return Engine.open(load_api("recording"), args, machine_id=0)


def generate_of(strategy: str, role: Role, stage: Any = None, **recording: Any) -> Generate:
    config = WorkerConfig(model="org/model", role=role, strategy=strategy)
    return build_generate(config, engine(**recording), stage or RecordingStageClient())


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
async def test_both_orders_give_the_tokens_of_one_engine(tokens_per_step: int) -> None:
    whole = generate_of("prefill_first", Role.AGG, tokens_per_step=tokens_per_step)
    assert tokens_of(await collect(whole, request(10))) == expected_tokens(10)
    for strategy, first, second in (
        ("prefill_first", Role.PREFILL, Role.DECODE),
        ("decode_first", Role.DECODE, Role.PREFILL),
    ):
        stage = RecordingStageClient(generate_of(strategy, second, tokens_per_step=tokens_per_step))
        first_stage = generate_of(strategy, first, stage, tokens_per_step=tokens_per_step)
        chunks = await collect(first_stage, request(10))
        assert tokens_of(chunks) == expected_tokens(10)
        assert len(chunks[0].token_ids) == 1
        assert chunks[-1].finish_reason == "length"
        await stage.idle()


async def test_a_late_reader_finds_all_that_is_due() -> None:
    opened = engine(step_seconds=0.01)
    result = opened.start_agg(request(100))
    await anext(aiter(result))
    first = len(result.outputs[0].token_ids)
    await asyncio.sleep(0.05)
    await anext(aiter(result))
    assert len(result.outputs[0].token_ids) >= first + 4
    result.abort()
    await result.aresult()
    assert result.outputs[0].finish_reason == "cancelled"
    assert await opened.is_idle()


async def test_recording_engine_ignores_sampling_options_but_length() -> None:
    stop = expected_tokens(2)[1]
    stopping = request(4, stop_conditions={"max_tokens": 4, "stop_token_ids": [stop]})
    assert (await engine().start_agg(stopping).aresult()).outputs[0].token_ids == expected_tokens(4)


def test_zero_tokens_per_step_is_refused() -> None:
    with pytest.raises(ValidationError, match="tokens_per_step"):
        engine(tokens_per_step=0)


async def test_recording_engine_keeps_the_newest_256_requests() -> None:
    opened = engine()
    for count in range(1, 301):
        await opened.start_agg(request(count)).aresult()
    assert len(opened.llm.calls) == len(opened.llm.results) == 256
    assert opened.llm.calls[-1].arguments["sampling_params"].max_tokens == 300
    assert opened.llm not in recording.LLM.instances


async def test_recording_engine_counts_active_requests_unlike_the_plain_stand_in() -> None:
    opened = engine()
    aborted, read = opened.start_agg(request(3)), opened.start_agg(request(3))
    assert opened.llm.num_active_requests == 2
    aborted.abort()
    await read.aresult()
    assert opened.llm.num_active_requests == 0
    assert not hasattr(recording.LLM("org/model"), "num_active_requests")
