"""LLM(...): arguments without a documented default, and values that are taken or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from tests.conformance.api import find
from tests.conformance.conftest import MakeLlm

FIELDS = {
    "TorchLlmArgs": (
        "batch_wait_max_tokens_ratio",
        "batch_wait_timeout_iters",
        "batch_wait_timeout_ms",
        "dwdp_config",
        "enable_early_first_token_response",
        "generation_config",
        "gpus_per_node",
        "load_format",
        "max_stats_len",
        "moe_config",
        "prometheus_metrics_config",
        "sleep_config",
        "telemetry_config",
        "tokenizer",
        "tokenizer_mode",
        "torch_compile_config",
        "trust_remote_code",
    ),
    "KvCacheConfig": ("block_reuse_config", "pool_ratio", "avg_seq_len"),
    "CudaGraphConfig": ("mode",),
}


def args(**values: Any) -> Any:
    return find("TorchLlmArgs")(model="m", **values)


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in FIELDS.items() for field in fields]
)
def test_a_nested_configuration_has_the_field(name: str, field: str) -> None:
    assert field in find(name).model_fields


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("orchestrator_type", (None, "rpc", "ray")),
        ("guided_decoding_backend", (None, "xgrammar", "llguidance")),
        ("generation_config", ("trtllm", "auto")),
        ("backend", (None, "pytorch")),
        ("env_overrides", (None, {}, {"A": "b"})),
        ("speculative_config", (None,)),
        ("cuda_graph_config", (None,)),
    ],
)
def test_values_of_tensorrt_llm_are_taken_as_they_are(field: str, values: tuple[Any, ...]) -> None:
    assert [getattr(args(**{field: value}), field) for value in values] == list(values)


@pytest.mark.parametrize("policy", ["all_reusable", "per_request", "per_conversation"])
def test_each_policy_of_block_reuse_is_taken(policy: str) -> None:
    def chosen(**values: Any) -> str:
        found = find("KvCacheConfig")(**values).block_reuse_config.policy
        return str(getattr(found, "value", found))

    assert chosen(block_reuse_config={"policy": policy}) == policy
    assert chosen() == "all_reusable"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("KvCacheConfig", {"free_gpu_memory_fraction": -0.1}),
        ("KvCacheConfig", {"tokens_per_block": 0}),
        ("KvCacheConfig", {"block_reuse_config": {"policy": "never"}}),
        ("KvCacheConfig", {"kv_events_config": {"no_such_field": 1}}),
        ("TorchLlmArgs", {"kv_cache_config": {"no_such_field": 1}}),
        ("TorchLlmArgs", {"max_batch_size": "many"}),
        ("TorchLlmArgs", {"load_format": "sideways"}),
        ("TorchLlmArgs", {"generation_config": "mine"}),
    ],
)
def test_a_bad_value_is_refused(name: str, values: dict[str, Any]) -> None:
    more = {"model": "m"} if name == "TorchLlmArgs" else {}
    with pytest.raises(pydantic.ValidationError):
        find(name)(**more, **values)


def test_the_constructor_refuses_what_its_arguments_refuse(model: Path) -> None:
    with pytest.raises(pydantic.ValidationError, match="no_such_field"):
        find("LLM")(str(model), no_such_field=1)


def test_the_python_transceiver_needs_an_end_to_its_waiting(make_llm: MakeLlm) -> None:
    """The facts do not say whether the arguments or the engine complain."""
    transceiver = {"backend": "NIXL", "transceiver_runtime": "PYTHON", "kv_transfer_timeout_ms": None}
    with pytest.raises(Exception, match="finite kv_transfer_timeout_ms"):
        make_llm(cache_transceiver_config=transceiver)


def test_llm_args_are_available_with_defaults(llm: Any) -> None:
    assert isinstance(llm.args, find("BaseLlmArgs"))
    assert llm.args.attention_dp_config is None
    assert llm.args.kv_cache_config.event_buffer_max_size == 4096


# -- files of more arguments


def test_a_file_of_arguments_wins_over_others_and_joins_their_parts(tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("max_batch_size: 3\nkv_cache_config:\n  max_tokens: 640\n")
    update = find("update_llm_args_with_extra_options")
    given = {"model": "m", "max_batch_size": 5, "kv_cache_config": find("KvCacheConfig")(tokens_per_block=16)}
    made = args(**{key: value for key, value in update(given, str(file)).items() if key != "model"})
    assert (made.max_batch_size, made.kv_cache_config.max_tokens) == (3, 640)
