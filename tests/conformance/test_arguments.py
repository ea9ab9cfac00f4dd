"""LLM(...) and its configuration classes: fields, defaults, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pydantic
import pytest

from tests.conformance.api import find

KV_CACHE = {
    "enable_block_reuse": True,
    "max_tokens": None,
    "max_attention_window": None,
    "sink_token_length": None,
    "free_gpu_memory_fraction": 0.9,
    "host_cache_size": None,
    "disk_cache_size": None,
    "disk_cache_path": None,
    "cross_kv_cache_fraction": None,
    "secondary_offload_min_priority": None,
    "event_buffer_max_size": 0,
    "attention_dp_events_gather_period_ms": 5,
    "kv_events_config": None,
    "enable_partial_reuse": True,
    "copy_on_partial_reuse": True,
    "use_uvm": False,
    "max_gpu_total_bytes": 0,
    "iteration_stats_interval": 1,
    "dtype": "auto",
    "tokens_per_block": 32,
    "use_kv_cache_manager_v2": "auto",
    "kv_cache_event_hash_algo": "auto",
    "max_util_for_resume": 0.95,
}
KV_EVENTS = {
    "enable_kv_cache_events": False,
    "publisher": None,
    "endpoint": "tcp://*:5557",
    "replay_endpoint": None,
    "buffer_steps": 10_000,
    "hwm": 100_000,
    "max_queue_size": 100_000,
    "topic": "",
}
CACHE_TRANSCEIVER = {
    "backend": None,
    "transceiver_runtime": "auto",
    "max_tokens_in_buffer": None,
    "kv_transfer_timeout_ms": 60_000,
    "kv_transfer_sender_future_timeout_ms": 1000,
    "kv_transfer_poll_interval_ms": 5000,
    "kv_cache_bounce_size_mb": 0,
    "enable_pipelined_transfer": False,
}
SCHEDULER = {
    "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
    "context_chunking_policy": None,
    "dynamic_batch_config": None,
    "waiting_queue_policy": "fcfs",
    "use_python_scheduler": False,
    "enable_prefix_aware_scheduling": True,
}
DYNAMIC_BATCH = {
    "enable_batch_size_tuning": True,
    "enable_max_num_tokens_tuning": False,
    "dynamic_batch_moving_average_window": 128,
}
CUDA_GRAPH = {"max_batch_size": None, "batch_sizes": None, "enable_padding": False}
LLM_ARGS = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "context_parallel_size": 1,
    "enable_attention_dp": False,
    "enable_lm_head_tp_in_adp": False,
    "pp_partition": None,
    "cp_config": None,
    "enable_lora": False,
    "lora_config": None,
    "enable_chunked_prefill": False,
    "guided_decoding_backend": None,
    "batched_logits_processor": None,
    "iter_stats_max_iterations": None,
    "request_stats_max_iterations": None,
    "cache_transceiver_config": None,
    "speculative_config": None,
    "sparse_attention_config": None,
    "max_batch_size": 2048,
    "max_input_len": 1024,
    "max_seq_len": None,
    "max_beam_width": 1,
    "max_num_tokens": 8192,
    "gather_generation_logits": False,
    "num_postprocess_workers": 0,
    "reasoning_parser": None,
    "otlp_traces_endpoint": None,
    "return_perf_metrics": False,
    "perf_metrics_output_dir": None,
    "perf_metrics_max_requests": 0,
    "orchestrator_type": None,
    "env_overrides": None,
    "post_processor_hook": None,
    "num_serve_frontends": 1,
    "attention_dp_config": None,
    "disable_overlap_scheduler": False,
    "attn_backend": "TRTLLM",
    "enable_iter_perf_stats": False,
    "enable_iter_req_stats": False,
    "print_iter_log": False,
    "stream_interval": 1,
    "kv_connector_config": None,
}

CLASSES: dict[str, dict[str, Any]] = {
    "KvCacheConfig": KV_CACHE,
    "KVEventsConfig": KV_EVENTS,
    "CacheTransceiverConfig": CACHE_TRANSCEIVER,
    "SchedulerConfig": SCHEDULER,
    "DynamicBatchConfig": DYNAMIC_BATCH,
    "CudaGraphConfig": CUDA_GRAPH,
    "TorchLlmArgs": LLM_ARGS,
}


def args(**values: Any) -> Any:
    return find("TorchLlmArgs")(model="m", **values)


# -- fields and defaults


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in CLASSES.items() for field in fields]
)
def test_a_field_has_its_default(name: str, field: str) -> None:
    fields = find(name).model_fields
    assert field in fields
    # DynamicBatchConfig's are set by Dynamo, which passes them all.
    if not fields[field].is_required():
        default = fields[field].get_default(call_default_factory=True)
        assert getattr(default, "value", default) == CLASSES[name][field]


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


def test_the_constructor_takes_these_by_position() -> None:
    parameters = inspect.signature(find("LLM").__init__).parameters
    expected = {
        "model": inspect.Parameter.empty,
        "tokenizer": None,
        "tokenizer_mode": "auto",
        "skip_tokenizer_init": False,
        "trust_remote_code": False,
        "tensor_parallel_size": 1,
        "dtype": "auto",
        "revision": None,
        "tokenizer_revision": None,
    }
    assert list(parameters)[1 : len(expected) + 1] == list(expected)
    assert {name: parameters[name].default for name in expected} == expected
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD


def test_dynamo_reads_defaults_from_the_class() -> None:
    fields = find("BaseLlmArgs").model_fields
    names = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width")
    assert [fields[name].default for name in names] == [2048, 8192, None, 1]


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
    ("name", "members"),
    [
        ("CapacitySchedulerPolicy", {"GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"}),
        ("ContextChunkingPolicy", {"FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"}),
    ],
)
def test_each_enum_has_the_policies(name: str, members: set[str]) -> None:
    assert set(find(name).__members__) >= members


def test_environment_overrides_are_text() -> None:
    assert args(env_overrides={"A": "1"}).env_overrides == {"A": "1"}
