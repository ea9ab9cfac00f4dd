"""WorkerConfig: which stage a worker is, where it is reached, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trtllm_disagg.config.settings import endpoint_of, parse_endpoint_id
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.embedded.params.llm_args import KvCacheConfig, LlmArgs
from trtllm_disagg.errors import ConfigError


def config(**values: Any) -> WorkerConfig:
    return WorkerConfig(**{"model": "m"} | values)


FIRST = "dyn://dynamo.tensorrt_llm.generate"
DECODE = "dyn://dynamo.backend.generate"
PREFILL = "dyn://dynamo.prefill.generate"
FAIL = {"role": "decode", "on_missing_stage": "fail"}


@pytest.mark.parametrize(
    ("strategy", "role", "first", "calls", "endpoint", "next_endpoint", "peer"),
    [
        ("decode_first", "agg", True, False, DECODE, None, None),
        ("decode_first", "decode", True, True, FIRST, PREFILL, PREFILL),
        ("decode_first", "prefill", False, False, PREFILL, None, DECODE),
        ("prefill_first", "agg", True, False, DECODE, None, None),
        ("prefill_first", "prefill", True, True, FIRST, DECODE, DECODE),
        ("prefill_first", "decode", False, False, DECODE, None, PREFILL),
        ("router", "agg", True, False, DECODE, None, None),
        ("router", "prefill", True, False, PREFILL, None, DECODE),
        ("router", "decode", True, False, DECODE, None, PREFILL),
    ],
)
def test_a_stage_follows_from_strategy_and_role(
    strategy: str,
    role: str,
    first: bool,
    calls: bool,
    endpoint: str,
    next_endpoint: str | None,
    peer: str | None,
) -> None:
    worker = config(strategy=strategy, role=role)
    assert (worker.role, worker.is_first_stage, worker.calls_second_stage) == (Role(role), first, calls)
    assert worker.endpoint_id == endpoint
    assert (worker.next_endpoint_id, worker.peer_endpoint_id) == (next_endpoint, peer)
    if peer is not None:
        other = config(strategy=strategy, role={"prefill": "decode", "decode": "prefill"}[role])
        assert other.worker_endpoint_id == peer


def test_endpoints_of_the_two_stages_match_in_both_orders() -> None:
    for strategy in ("decode_first", "prefill_first"):
        pair = [config(strategy=strategy, role=role, namespace="ns") for role in (Role.PREFILL, Role.DECODE)]
        first, second = sorted(pair, key=lambda worker: not worker.is_first_stage)
        assert first.next_endpoint_id == second.endpoint_id == endpoint_of("ns", second.role)
        # Where they find each other does not depend on the order: a switch moves no worker.
        assert second.peer_endpoint_id == first.worker_endpoint_id == endpoint_of("ns", first.role)
        assert first.frontend_endpoint_id == second.frontend_endpoint_id == endpoint_of("ns", None)


def test_given_endpoints_win_over_the_derived_ones() -> None:
    worker = config(role="decode", endpoint="dyn://dynamo.a.b", next_endpoint="dyn://other.c.d")
    assert worker.endpoint_id == "dyn://dynamo.a.b"
    assert worker.next_endpoint_id == "dyn://other.c.d"


def test_served_model_name_defaults_to_the_model() -> None:
    assert config().model_name == "m"
    assert config(served_model_name="n").model_name == "n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"role": "encode"}, "--disaggregation-mode: 'encode' is not allowed; expected one of agg"),
        ({"strategy": "both"}, "--disaggregation-strategy: 'both'"),
        ({"engine": "vllm"}, "--engine: 'vllm' is not allowed; expected one of auto, tensorrt_llm, embedded"),
        ({"served_model_name": ""}, "--served-model-name: ''"),
        ({"namespace": "a.b"}, "--namespace: 'a.b'"),
        ({"endpoint": "dynamo/a/b"}, "--endpoint: 'dynamo/a/b'"),
        ({"endpoint": "dyn://dynamo.a"}, "expected dyn://namespace.component.endpoint"),
        ({"endpoint": "dyn://other.a.b"}, "expected an endpoint in the namespace 'dynamo'"),
        ({"next_endpoint": "dyn://dynamo.a.b"}, "--next-endpoint: 'dyn://dynamo.a.b'"),
        ({"role": "decode", "next_endpoint": FIRST}, "another endpoint than this worker's own"),
        ({"role": "prefill", "next_endpoint": PREFILL}, "in mode prefill under decode_first"),
        ({"strategy": "router", "role": "decode", "next_endpoint": PREFILL}, "under router"),
        ({"kv_state_endpoint": "dynamo.a"}, "expected namespace/component/endpoint"),
        (FAIL | {"max_local_fallbacks": 2}, "--max-local-fallbacks: 2"),
        (FAIL | {"max_local_fallback_tokens": 9}, "--max-local-fallback-tokens: 9"),
        ({"model": " "}, "--model"),
        ({"role": "decode", "max_beam_width": 2}, "--max-beam-width: 2"),
        ({"schedule_style": "generation_first"}, "--schedule-style: 'generation_first'"),
        (
            {"role": "decode", "prefill_dispatch": "queue", "schedule_style": "generation_first"},
            "--prefill-dispatch: 'queue'",
        ),
        ({"kv_block_size": 48}, "--kv-block-size: 48 is not allowed; expected a power of two"),
        ({"kv_block_size": 0}, "--kv-block-size: 0"),
        ({"max_batch_size": 0}, "--max-batch-size: 0"),
        ({"max_num_tokens": -1}, "--max-num-tokens: -1"),
        ({"max_seq_len": 0}, "--max-seq-len: 0"),
        ({"tensor_parallel_size": True}, "--tensor-parallel-size: True"),
        ({"gpus_per_node": 0}, "--gpus-per-node: 0"),
        ({"free_gpu_memory_fraction": 1.5}, "--free-gpu-memory-fraction: 1.5"),
        ({"load_format": "fast"}, "--load-format: 'fast'"),
        ({"guided_decoding_backend": "outlines"}, "--guided-decoding-backend: 'outlines'"),
        ({"discovery_backend": "dns"}, "--discovery-backend: 'dns'"),
        ({"endpoint_types": "chat,images"}, "--endpoint-types: 'chat,images'"),
        ({"endpoint_types": "none,chat"}, "--endpoint-types: 'none,chat'"),
    ],
)
def test_a_bad_value_names_the_flag_the_value_and_what_is_allowed(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**values)
    assert message in str(caught.value)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().role = Role.DECODE  # type: ignore[misc]


def test_setting_is_explicit_when_given_or_not_the_default() -> None:
    assert not config().is_explicit("max_batch_size")
    assert config(max_batch_size=8).is_explicit("max_batch_size")
    assert config(explicit=frozenset({"max_batch_size"})).is_explicit("max_batch_size")


def test_size_defaults_are_those_of_llm_args() -> None:
    worker, llm, kv = config(), LlmArgs(model="m"), KvCacheConfig()
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width", "tensor_parallel_size"):
        assert getattr(worker, name) == getattr(llm, name)
    assert worker.kv_block_size == kv.tokens_per_block
    assert worker.free_gpu_memory_fraction == kv.free_gpu_memory_fraction


def test_an_endpoint_splits_into_its_parts() -> None:
    parts = parse_endpoint_id("dyn://ns.comp.ep")
    assert parts == ("ns", "comp", "ep")
    assert parts.dotted == "ns.comp.ep"
    assert parts.url == "dyn://ns.comp.ep"
    with pytest.raises(ConfigError, match="DYN_ENDPOINT"):
        parse_endpoint_id("ns.comp", "DYN_ENDPOINT")
