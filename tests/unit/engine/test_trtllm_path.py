"""The way to TensorRT-LLM, with a stand-in that refuses every name and keyword that it does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.handling import ORDERS, PROMPT, collect, expected_tokens, raw_request, request, tokens_of
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engine.rank_placement import Affinity
from trtllm_disagg.engines.recording import llm as recording
from trtllm_disagg.engines.recording.llm import LLM, DisaggregatedParams, SamplingParams
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.types import Generate
from trtllm_disagg.wire.bodies import decode_request

pytestmark = pytest.mark.usefixtures("tensorrt_llm")

CONFIGS = Path(__file__).parents[3] / "engine_configs"
MODELS = ["llama-3.1-8b", "qwen3"]


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


def pair(strategy: str, model: str = MODELS[0]) -> tuple[Generate, LLM, LLM, RecordingStageClient]:
    """A first stage that calls a second one; each on its own engine and file."""
    prefill, decode = opened(Role.PREFILL, model), opened(Role.DECODE, model)
    first, second = (
        (Role.PREFILL, Role.DECODE) if strategy == "prefill_first" else (Role.DECODE, Role.PREFILL)
    )
    engines = {Role.PREFILL: prefill, Role.DECODE: decode}

    def handler(role: Role, client: RecordingStageClient) -> Generate:
        return build_generate(worker(role, model, strategy=strategy)[0], engines[role], client)

    client = RecordingStageClient(handler(second, RecordingStageClient()))
    return handler(first, client), prefill.llm, decode.llm, client


# -- generate_async(...)


@pytest.mark.parametrize("settings", [{}, {"override_engine_args": '{"skip_tokenizer_init": true}'}])
async def test_an_aggregated_request_is_one_call_with_upstreams_arguments(settings: dict[str, str]) -> None:
    """With skip_tokenizer_init TensorRT-LLM would want each request to say which token ends it."""
    engine = opened(Role.AGG, **settings)
    generate = build_generate(worker(Role.AGG)[0], engine, RecordingStageClient())
    assert tokens_of(await collect(generate, request(max_tokens=3))) == expected_tokens(3)
    sampling = SamplingParams(max_tokens=3, temperature=0.5, detokenize=False)
    (call,) = engine.llm.calls_of("generate_async")
    assert call == {"inputs": PROMPT, "sampling_params": sampling, "streaming": True}


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
            opaque_state=made.opaque_state,
            disagg_request_id=disagg_id,
            ctx_info_endpoint=made.ctx_info_endpoint,
        ),
    }
    assert made.first_gen_log_probs == [{expected_tokens(1)[0]: recording.Logprob(-1.0, 1)}]
    assert json.loads(json.dumps(client.requests)) == client.requests


#: What Dynamo's frontend makes of `response_format`, and of a tool that `tool_choice` forces.
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize("strategy", ORDERS)
@pytest.mark.parametrize("model", sorted(path.parent.name for path in CONFIGS.glob("*/worker.env")))
async def test_a_guided_request_reaches_both_engines_of_each_shipped_pair(model: str, strategy: str) -> None:
    generate, prefill, decode, _ = pair(strategy, model)
    asked = decode_request(raw_request(max_tokens=4, sampling_options={"guided_decoding": {"json": SCHEMA}}))
    assert tokens_of(await collect(generate, asked)) == expected_tokens(4)
    for llm in (prefill, decode):
        (call,) = llm.calls_of("generate_async")
        assert call["sampling_params"].guided_decoding.json == SCHEMA


# -- where ranks are placed


TALK = {"agent_context": {"session_id": " talk-1 "}, "routing": {"dp_rank": 1}}
IN_YAML = {"attention_dp_config": {"kv_cache_routing_conversation_affinity": True}}


def told(affinity: Affinity, keys: dict[str, Any], **args: Any) -> tuple[Any, Any]:
    """(conversation, rank) as the engine hears of them."""
    args |= {"model": "m", "max_seq_len": 99, "enable_attention_dp": True, "tensor_parallel_size": 2}
    engine = Engine.open(load_api("tensorrt_llm"), args, 0, affinity)
    engine.start_agg(request(**keys))
    (call,) = engine.llm.calls_of("generate_async")
    conversation, scheduling = call.get("conversation_params"), call.get("scheduling_params")
    return (
        conversation and conversation.conversation_id,
        scheduling and (scheduling.attention_dp_rank, scheduling.attention_dp_relax),
    )


@pytest.mark.parametrize(
    ("affinity", "keys", "args", "heard"),
    [
        (Affinity(), TALK, {}, (None, (1, False))),
        (Affinity(is_on=True), TALK, {}, ("talk-1", None)),
        (Affinity(), TALK, IN_YAML, ("talk-1", None)),
        (Affinity(is_on=True, by_router=True), TALK, {}, ("talk-1", (1, False))),
        (Affinity(is_on=True, by_router=True), {"routing": {"dp_rank": 1}}, {}, (None, None)),
        (Affinity(is_on=True), {"agent_context": {"session_id": "  "}}, {}, (None, None)),
        (Affinity(is_on=True), {"agent_context": "text"}, {}, (None, None)),
    ],
)
def test_conversation_and_rank_reach_the_engine(
    affinity: Affinity, keys: dict[str, Any], args: dict[str, Any], heard: tuple[Any, Any]
) -> None:
    assert told(affinity, keys, **args) == heard


@pytest.mark.parametrize("flag", [True, False])
def test_an_affinity_that_the_engine_has_not_is_refused_by_the_key_that_asks_for_it(flag: bool) -> None:
    api = load_api("recording")
    args = {"model": "m", "max_seq_len": 99} | ({} if flag else IN_YAML)
    named = "^--conversation-affinity: " if flag else "^attention_dp_config.kv_cache_routing_conversation_aff"
    with pytest.raises(ConfigError, match=named):
        Engine.open(api, args, 0, Affinity(is_on=flag))
