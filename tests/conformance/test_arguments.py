"""LLM(...) and its configuration classes: what is taken and refused.

Fields and defaults: tests/unit/engines/recording/test_llm_api_pins.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from tests.conformance.api import find
from tests.conformance.conftest import MakeLlm

CLASSES = (
    "KvCacheConfig",
    "KVEventsConfig",
    "CacheTransceiverConfig",
    "SchedulerConfig",
    "DynamicBatchConfig",
    "CudaGraphConfig",
    "TorchLlmArgs",
)


def args(**values: Any) -> Any:
    return find("TorchLlmArgs")(model="m", **values)


# -- fields and defaults


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("kv_cache_config", "KvCacheConfig"),
        ("scheduler_config", "SchedulerConfig"),
        ("cuda_graph_config", "CudaGraphConfig"),
    ],
)
def test_a_part_that_is_there_by_default_has_its_own_defaults(field: str, name: str) -> None:
    assert getattr(args(), field) == find(name)()


def test_load_format_is_auto() -> None:
    auto = find("TorchLlmArgs").model_fields["load_format"].get_default(call_default_factory=True)
    assert str(getattr(auto, "name", auto)).lower() == "auto"
    assert {"AUTO", "DUMMY", "VISION_ONLY"} <= set(find("LoadFormat").__members__)


def test_the_settings_of_cuda_graphs_are_known() -> None:
    known = {"max_batch_size", "batch_sizes", "enable_padding", "mode"}
    assert set(find("CudaGraphConfig").model_fields) >= known


# -- values


def test_explicit_null_size_is_the_default_except_for_max_seq_len() -> None:
    made = args(
        max_batch_size=None, max_input_len=None, max_beam_width=None, max_num_tokens=None, max_seq_len=None
    )
    assert (made.max_batch_size, made.max_input_len, made.max_beam_width) == (2048, 1024, 1)
    assert (made.max_num_tokens, made.max_seq_len) == (8192, None)


def test_unset_moe_sizes_become_minus_one() -> None:
    made = args()
    sizes = (made.moe_tensor_parallel_size, made.moe_expert_parallel_size, made.moe_cluster_parallel_size)
    assert sizes == (-1, -1, -1)


def test_more_sequences_than_tokens_in_a_step_only_warns() -> None:
    made = args(max_batch_size=4096, max_num_tokens=1024)
    assert (made.max_batch_size, made.max_num_tokens) == (4096, 1024)


def test_the_removed_sampler_type_is_tolerated_where_it_named_the_one_that_is_left() -> None:
    for name in ("auto", "TorchSampler"):
        assert not hasattr(args(sampler_type=name), "sampler_type")
    with pytest.raises(ValueError):
        args(sampler_type="TRTLLMSampler")


@pytest.mark.parametrize("name", CLASSES)
def test_an_unknown_field_is_refused(name: str) -> None:
    values = {"model": "m"} if name == "TorchLlmArgs" else {}
    with pytest.raises(pydantic.ValidationError, match="no_such_field"):
        find(name)(**values, no_such_field=1)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("TorchLlmArgs", {"guided_decoding_backend": "outlines"}),
        ("TorchLlmArgs", {"orchestrator_type": "mpi"}),
        ("TorchLlmArgs", {"cache_transceiver_config": {"backend": "nccl"}}),
        ("CacheTransceiverConfig", {"backend": "nixl"}),
        ("CacheTransceiverConfig", {"kv_transfer_timeout_ms": 0}),
        ("CacheTransceiverConfig", {"kv_cache_bounce_size_mb": -1}),
        ("CacheTransceiverConfig", {"transceiver_runtime": "RUST"}),
        ("KvCacheConfig", {"free_gpu_memory_fraction": 1.1}),
        ("KvCacheConfig", {"tokens_per_block": 48}),
        ("KvCacheConfig", {"kv_cache_event_hash_algo": "md5"}),
        ("SchedulerConfig", {"capacity_scheduler_policy": "NEVER"}),
        ("SchedulerConfig", {"context_chunking_policy": "NEVER"}),
        ("SchedulerConfig", {"waiting_queue_policy": "lifo"}),
        ("KVEventsConfig", {"publisher": "nats"}),
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


@pytest.mark.parametrize("backend", [None, "DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"])
def test_each_backend_of_the_transceiver_is_taken(backend: str | None) -> None:
    assert find("CacheTransceiverConfig")(backend=backend).backend == backend


def test_the_python_transceiver_needs_nixl() -> None:
    def transceiver(backend: str) -> Any:
        return {"backend": backend, "transceiver_runtime": "PYTHON"}

    made = args(cache_transceiver_config=transceiver("NIXL"))
    assert made.cache_transceiver_config.transceiver_runtime == "PYTHON"
    with pytest.raises(ValueError, match="NIXL"):
        args(cache_transceiver_config=transceiver("UCX"))


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
