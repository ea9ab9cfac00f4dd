"""The way to TensorRT-LLM, with a stand-in that refuses every name and keyword that it does not have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.handling import (
    ORDERS,
    PROMPT,
    collect,
    expected_tokens,
    raw_request,
    request,
    tokens_of,
    until,
)
from tests.support.sinks import RecordingEventSink, RecordingLoadSink, RecordingStatsSink, Stored
from tests.support.stage_client import FakeContext, RecordingStageClient
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.kv_events import EventsOfRank, KvEventForwarder
from trtllm_disagg.dynamo_runtime.publishers import StatsForwarder
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.engines import resolve_engine
from trtllm_disagg.engine.llm_api import LlmApi, load_api
from trtllm_disagg.engines.embedded.api.mounted_names import ConversationParams
from trtllm_disagg.engines.embedded.params.request_params import SchedulingParams
from trtllm_disagg.engines.recording import llm as recording
from trtllm_disagg.engines.recording.llm import LLM, DisaggregatedParams, SamplingParams
from trtllm_disagg.engines.recording.mounted import mounted_recording_llm
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.types import Generate
from trtllm_disagg.wire.bodies import decode_request

pytestmark = pytest.mark.usefixtures("tensorrt_llm")

CONFIGS = Path(__file__).parents[3] / "engine_configs"
MODELS = ["llama-3.1-8b", "qwen3"]
ROLES = [Role.AGG, Role.PREFILL, Role.DECODE]


def worker(role: Role, model: str = MODELS[0], **settings: Any) -> tuple[WorkerConfig, dict[str, Any]]:
    config = WorkerConfig(
        model="meta-llama/Llama-3.1-8B-Instruct",
        role=role,
        engine="tensorrt_llm",
        extra_engine_args=str(CONFIGS / model / f"{role}.yaml"),
        **settings,
    )
    return config, build_engine_args(config)


def opened(role: Role, model: str = MODELS[0], **settings: Any) -> Engine:
    return Engine.open(load_api("tensorrt_llm"), worker(role, model, **settings)[1], machine_id=70)


def pair(strategy: str) -> tuple[Generate, LLM, LLM, RecordingStageClient]:
    """A first stage that calls a second one; each on its own engine and file."""
    prefill, decode = opened(Role.PREFILL), opened(Role.DECODE)
    first, second = (
        (Role.PREFILL, Role.DECODE) if strategy == "prefill_first" else (Role.DECODE, Role.PREFILL)
    )
    engines = {Role.PREFILL: prefill, Role.DECODE: decode}

    def handler(role: Role, client: RecordingStageClient) -> Generate:
        return build_generate(worker(role, strategy=strategy)[0], engines[role], client)

    client = RecordingStageClient(handler(second, RecordingStageClient()))
    return handler(first, client), prefill.llm, decode.llm, client


# -- names


def test_the_fixture_is_the_only_tensorrt_llm(tensorrt_llm: ModuleType) -> None:
    assert sys.modules["tensorrt_llm"] is tensorrt_llm


def test_mounted_stand_in_is_removed_from_sys_modules_after_the_block() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("tensorrt_llm")}
    with mounted_recording_llm() as inner:
        assert sys.modules["tensorrt_llm"] is inner
        assert inner is not before["tensorrt_llm"]
    assert {name: sys.modules[name] for name in sys.modules if name.startswith("tensorrt_llm")} == before


def test_every_name_comes_from_where_tensorrt_llm_keeps_it() -> None:
    assert load_api("tensorrt_llm") == LlmApi(
        name="tensorrt_llm",
        llm=LLM,
        sampling_params=SamplingParams,
        guided_decoding_params=recording.GuidedDecodingParams,
        disaggregated_params=DisaggregatedParams,
        logprob=recording.Logprob,
        request_error=recording.RequestError,
        new_disagg_request_id=recording.get_global_disagg_request_id,
        scheduling_params=SchedulingParams,
        conversation_params=ConversationParams,
    )


def test_auto_prefers_tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert resolve_engine("auto") == "tensorrt_llm"


# -- LLM(...)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("role", ROLES)
def test_every_shipped_file_opens_an_engine(model: str, role: Role) -> None:
    engine = opened(role, model)
    assert engine.max_seq_len == 16384
    assert engine.llm.calls[0].name == "LLM"
    assert engine.llm.args.tensor_parallel_size == 1


def test_a_prefill_worker_gives_tensorrt_llm_these_keywords() -> None:
    assert opened(Role.PREFILL).llm.calls[0].arguments == {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "load_format": "auto",
        "pipeline_parallel_size": 1,
        "enable_attention_dp": False,
        "max_seq_len": 16384,
        "max_batch_size": 16,
        "max_num_tokens": 8192,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": True,
        "cuda_graph_config": {"max_batch_size": 16, "enable_padding": True},
        "kv_cache_config": {
            "tokens_per_block": 32,
            "free_gpu_memory_fraction": 0.85,
            "enable_block_reuse": True,
            "dtype": "auto",
        },
        "cache_transceiver_config": {
            "backend": "NIXL",
            "max_tokens_in_buffer": 16384,
            "kv_transfer_timeout_ms": 60000,
        },
        "scheduler_config": {
            "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
            "dynamic_batch_config": {
                "enable_batch_size_tuning": True,
                "enable_max_num_tokens_tuning": False,
                "dynamic_batch_moving_average_window": 128,
            },
        },
        "return_perf_metrics": False,
        "enable_iter_perf_stats": worker(Role.PREFILL)[1]["enable_iter_perf_stats"],
    }


@pytest.mark.parametrize("model", MODELS)
def test_decode_overlaps_and_agg_has_no_transceiver(model: str) -> None:
    decode, agg = (opened(role, model).llm.calls[0].arguments for role in (Role.DECODE, Role.AGG))
    assert decode["disable_overlap_scheduler"] is False
    assert decode["max_num_tokens"] == 2048
    assert "cache_transceiver_config" not in agg


# -- generate_async(...)


async def test_an_aggregated_request_is_one_call_with_upstreams_arguments() -> None:
    engine = opened(Role.AGG)
    generate = build_generate(worker(Role.AGG)[0], engine, RecordingStageClient())
    assert tokens_of(await collect(generate, request(max_tokens=3))) == expected_tokens(3)
    sampling = SamplingParams(max_tokens=3, temperature=0.5, detokenize=False)
    (call,) = engine.llm.calls_of("generate_async")
    assert call == {"inputs": PROMPT, "sampling_params": sampling, "streaming": True}


async def test_skip_tokenizer_init_in_a_file_has_no_effect() -> None:
    """TensorRT-LLM would want each request to say which token ends it."""
    engine = opened(Role.AGG, override_engine_args='{"skip_tokenizer_init": true}')
    generate = build_generate(worker(Role.AGG)[0], engine, RecordingStageClient())
    assert tokens_of(await collect(generate, request(max_tokens=3))) == expected_tokens(3)


@pytest.mark.parametrize("strategy", ORDERS)
async def test_both_phases_give_tensorrt_llm_the_expected_calls(strategy: str) -> None:
    generate, prefill, decode, client = pair(strategy)
    asked = decode_request(
        raw_request(
            max_tokens=4,
            output_options={"logprobs": 0},
            sampling_options={"temperature": 0.25, "seed": 3},
            routing={"cache_salt": "tenant-1"},
            priority=0.75,
        )
    )
    chunks = await collect(generate, asked)
    assert tokens_of(chunks) == expected_tokens(4)
    common = {"inputs": PROMPT, "cache_salt": "tenant-1", "priority": 0.75}
    options: dict[str, Any] = {"temperature": 0.25, "seed": 3, "logprobs": 1, "detokenize": False}
    ((first,), (second,)) = (llm.calls_of("generate_async") for llm in (prefill, decode))
    disagg_id = first["disaggregated_params"].disagg_request_id
    assert first == common | {
        "sampling_params": SamplingParams(max_tokens=1, **options),
        "streaming": False,
        "disaggregated_params": DisaggregatedParams(request_type="context_only", disagg_request_id=disagg_id),
    }
    made = prefill.results[0].outputs[0].disaggregated_params
    assert made is not None
    assert second == common | {
        "sampling_params": SamplingParams(max_tokens=4, **options),
        "streaming": True,
        "disaggregated_params": DisaggregatedParams(
            request_type="generation_only",
            first_gen_tokens=expected_tokens(1),
            first_gen_log_probs=made.first_gen_log_probs,
            ctx_request_id=disagg_id,
            disagg_request_id=disagg_id,
            opaque_state=made.opaque_state,
        ),
    }
    assert made.first_gen_log_probs == [{expected_tokens(1)[0]: recording.Logprob(-1.0, 1)}]
    assert json.loads(json.dumps(client.requests)) == client.requests


async def test_handoff_ids_are_made_for_this_worker() -> None:
    """TensorRT-LLM takes a node below 256 and a process below 64; this machine_id is 64 + 6."""
    engine = opened(Role.PREFILL)
    result = engine.start_prefill(request())
    params = engine.llm.calls_of("generate_async")[0]["disaggregated_params"]
    assert params.disagg_request_id >> 10 & 0x3FFF == 1 << 6 | 6
    result.abort()


async def test_a_handoff_of_the_python_transceiver_reaches_decode() -> None:
    """TensorRT-LLM's default with NIXL: no opaque_state, an endpoint instead."""
    override = json.dumps({"cache_transceiver_config": {"transceiver_runtime": "PYTHON"}})
    prefill = opened(Role.PREFILL, override_engine_args=override)
    config = worker(Role.PREFILL, strategy="prefill_first")[0]
    decode = opened(Role.DECODE, override_engine_args=override)
    second = worker(Role.DECODE, strategy="prefill_first")[0]
    client = RecordingStageClient(build_generate(second, decode, RecordingStageClient()))
    chunks = await collect(build_generate(config, prefill, client), request())
    assert tokens_of(chunks) == expected_tokens(5)
    given: DisaggregatedParams = decode.llm.calls_of("generate_async")[0]["disaggregated_params"]
    assert given.opaque_state is None
    assert given.ctx_info_endpoint


@pytest.mark.parametrize("strategy", ORDERS)
async def test_abort_goes_to_the_result_and_not_the_engine(strategy: str) -> None:
    generate, _, decode, client = pair(strategy)
    context = FakeContext()
    chunks = generate(request(max_tokens=500), context)
    for _ in range(3):
        await anext(chunks)
    context.stop()
    async for _ in chunks:
        pass
    await client.idle()
    assert decode.results[0].is_aborted


def test_closing_shuts_the_llm_down() -> None:
    engine = opened(Role.AGG)
    engine.close()
    assert [call.name for call in engine.llm.calls] == ["LLM", "shutdown"]


# -- events and statistics


async def test_kv_events_are_an_async_iterable() -> None:
    engine = opened(Role.PREFILL, publish_kv_events=True)
    assert engine.llm.args.kv_cache_config.event_buffer_max_size == 100_000
    tokens = [{"type": "unique_token", "token_id": n, "token_extra_id": 0} for n in range(32)]
    blocks = [{"type": "stored_block", "block_hash": 5, "tokens": tokens, "cache_level": 0}]
    data = {"type": "stored", "parent_hash": None, "blocks": blocks}
    engine.llm.kv_cache_events = [{"event_id": 0, "window_size": 16384, "data": data}]
    sink = RecordingEventSink()
    block_size = engine.llm.get_kv_cache_capacity()["tokensPerBlock"]
    publisher = KvEventForwarder(engine.llm, [EventsOfRank([sink], block_size)])
    await publisher.start()
    await until(lambda: sink.events)
    await publisher.stop()
    assert sink.events == [Stored(list(range(32)), [32], [5], None, None)]


async def test_statistics_are_an_async_iterable() -> None:
    engine = opened(Role.DECODE, publish_metrics=True)
    assert engine.llm.args.enable_iter_perf_stats
    engine.llm.stats = [
        {"kvCacheStats": {"usedNumBlocks": 3}, "numActiveRequests": 0, "numQueuedRequests": 0}
    ]
    load = RecordingLoadSink()
    await StatsForwarder(engine.llm, load, RecordingStatsSink()).poll()
    assert load.loads == [(None, 3)]
    assert await engine.is_idle()
