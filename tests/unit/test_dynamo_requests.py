"""Requests as `python -m dynamo.trtllm` 1.6.1 serves them, on a stand-in that is as hard as TensorRT-LLM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.handling import ORDERS, collect, raw_request, request
from tests.support.recording_pair import make_pair
from tests.support.stage_client import FakeContext, RecordingStageClient
from tests.support.trying import logged
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.handler import Handler
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engines.recording.llm import Logprob, Script
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.types import Generate, TokenChunk, Usage

pytestmark = pytest.mark.usefixtures("tensorrt_llm")


def agg(**args: Any) -> tuple[Engine, Generate]:
    """A worker without a peer, down to what Dynamo is given."""
    engine = Engine.open(load_api("tensorrt_llm"), {"model": "m", "max_seq_len": 99} | args, 0)
    config = WorkerConfig(model="m", role=Role.AGG, engine="tensorrt_llm")
    return engine, logged(build_generate(config, engine, RecordingStageClient()), "agg")


PREFILL_ARGS = {"model": "m", "max_seq_len": 99, "cache_transceiver_config": {"backend": "NIXL"}}


def last_call(engine: Engine) -> dict[str, Any]:
    call: dict[str, Any] = engine.llm.calls_of("generate_async")[-1]
    return call


# -- what goes to the engine beside the prompt


class Traced(FakeContext):
    """Of a request with a span around it."""

    def trace_headers(self) -> dict[str, str]:
        return {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.mark.parametrize(("context", "headers"), [(Traced, Traced().trace_headers()), (FakeContext, None)])
async def test_the_engine_gets_the_trace_of_the_request(
    context: type[FakeContext], headers: dict[str, str] | None
) -> None:
    engine, generate = agg()
    handler = Handler(generate, dict).function
    assert [answer async for answer in handler(raw_request(), context())]
    assert last_call(engine).get("trace_headers") == headers


@pytest.mark.parametrize(
    ("keys", "salt"),
    [
        ({"routing": {"cache_salt": "a"}, "extra_args": {"nvext": {"cache_salt": "b"}}}, "a"),
        ({"routing": {"cache_salt": ""}, "extra_args": {"nvext": {"cache_salt": "b"}}}, "b"),
        ({"extra_args": {"nvext": {"cache_salt": "b"}}}, "b"),
        ({"extra_args": {"nvext": {"cache_salt": ""}}}, None),
        ({"extra_args": {"nvext": None}}, None),
        ({"extra_args": None}, None),
    ],
)
async def test_the_salt_is_the_routing_hint_or_the_extensions(keys: dict[str, Any], salt: str | None) -> None:
    engine, generate = agg()
    await collect(generate, request(**keys))
    assert last_call(engine).get("cache_salt") == salt


async def test_stop_tokens_that_are_wanted_are_left_to_the_frontend() -> None:
    engine, generate = agg()
    await collect(generate, request(output_options={"no_stop_trim": True}))
    assert last_call(engine)["sampling_params"].ignore_eos is True


# -- what comes back


def engine_data(chunks: list[TokenChunk]) -> dict[str, Any]:
    """Of the last chunk; no other one has any but the trace of the request."""
    assert all(set(chunk.engine_data or {}) <= {"disagg"} for chunk in chunks[:-1])
    data = dict(chunks[-1].engine_data or {})
    data.pop("disagg", None)
    return data


async def test_logprobs_of_the_prompt_are_in_the_last_chunk() -> None:
    engine, generate = agg()
    # The engine's entries are about the next token: the last one is about the answer's first.
    of_prompt = [{12: Logprob(-0.5, 1), 7: Logprob(-1.5, 2)}, {13: Logprob(-2.0)}, {14: Logprob(-3.0)}]
    engine.llm.scripts.append(Script(prompt_logprobs=of_prompt))
    chunks = await collect(generate, request(output_options={"prompt_logprobs": 1}))
    assert last_call(engine)["sampling_params"].prompt_logprobs == 1
    assert engine_data(chunks)["prompt_logprobs"] == [
        None,
        {"12": {"logprob": -0.5, "rank": 1}, "7": {"logprob": -1.5, "rank": 2}},
        {"13": {"logprob": -2.0}},
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("max_tokens", [4, 1])
async def test_logprobs_of_the_prompt_come_from_prefill_and_leave_with_the_last_token(
    order: str, max_tokens: int
) -> None:
    pair = make_pair(order)
    pair.prefill.scripts.append(Script(prompt_logprobs=[{12: Logprob(-0.5, 1)}, {13: Logprob(-1.0)}]))
    asked = request(output_options={"prompt_logprobs": 0}, stop_conditions={"max_tokens": max_tokens})
    chunks = await collect(pair.generate, asked)
    assert engine_data(chunks)["prompt_logprobs"] == [None, {"12": {"logprob": -0.5, "rank": 1}}]
    told = [
        [call["sampling_params"].prompt_logprobs for call in llm.calls_of("generate_async")]
        for llm in (pair.prefill, pair.decode)
    ]
    assert told == [[0], [None] if max_tokens > 1 else []]


async def test_kv_cache_hit_is_in_the_last_chunk() -> None:
    engine, generate = agg()
    engine.llm.scripts.append(Script(cached_tokens=2))
    chunks = await collect(generate, request())
    assert engine_data(chunks) == {"kv_cache_hit": {"prompt_tokens": 3, "reused_tokens": 2}}
    assert chunks[-1].completion_usage == Usage.of(3, 5, 2)


@pytest.mark.parametrize(("order", "tells"), [("prefill_first", True), ("decode_first", False)])
async def test_kv_cache_hit_is_sent_only_by_the_worker_that_the_router_chose(order: str, tells: bool) -> None:
    workers = make_pair(order)
    workers.prefill.scripts.append(Script(cached_tokens=2))
    chunks = await collect(logged(workers.generate, "first"), request())
    assert ("kv_cache_hit" in engine_data(chunks)) is tells
    assert chunks[-1].completion_usage == Usage.of(3, 5, 2)


async def test_prefill_worker_under_router_sends_kv_cache_hit() -> None:
    engine = Engine.open(load_api("tensorrt_llm"), PREFILL_ARGS, 0)
    engine.llm.scripts.append(Script(cached_tokens=2))
    config = WorkerConfig(model="m", role=Role.PREFILL, strategy="router", engine="tensorrt_llm")
    answers = build_generate(config, engine, RecordingStageClient())
    generate = logged(answers, "prefill/router")
    (chunk,) = await collect(generate, request())
    assert chunk.disaggregated_params is not None
    assert engine_data([chunk]) == {"kv_cache_hit": {"prompt_tokens": 3, "reused_tokens": 2}}
