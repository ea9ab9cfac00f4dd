"""What the embedded engine does with the arguments of TensorRT-LLM: serve, refuse, or leave without effect.

A setting that would change an answer is never dropped silently.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.kv_transfer.access import TransferScope, choose_scope
from trtllm_disagg.kv_transfer.transports import backends

if TYPE_CHECKING:
    from trtllm_disagg.embedded.params.llm_args import LlmArgs


def refuse_unsupported(args: LlmArgs, model_dtype: str | None = None) -> list[str]:
    """Raise ConfigError for the first argument that the embedded engine cannot honour.

    `model_dtype` is the model's own dtype, once known. Returns the names of the arguments that were set but
    have no effect here, for one line in the log.
    """
    for key, values, expected in _BUILT:
        value = _read(args, key)
        if value not in values:
            raise ConfigError.bad_value(key, value, f"{expected}, on the embedded engine")
    _check_kv_dtype(args, model_dtype)
    _check_tokenizer(args)
    _check_ranks(args)
    _check_processors(args)
    _check_scope(args)
    this_cpu()  # refuses a level that there is not
    return [key for key in _NO_EFFECT if _read(args, key) != _default(args, key)]


def scope_of(args: LlmArgs) -> TransferScope:
    """How far KV travels. Raises ConfigError."""
    return choose_scope(args.embedded.transfer_host, args.embedded.transfer_key_file)


def _check_scope(args: LlmArgs) -> None:
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return
    if config.backend not in (allowed := backends()):
        expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}, on the embedded engine"
        raise ConfigError.bad_value("cache_transceiver_config.backend", config.backend, expected)
    scope_of(args).authentication()


def _read(model: BaseModel, key: str) -> Any:
    """The value at a dotted key, enums by name; None where a part of the way is not set."""
    value: Any = model
    for name in key.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value.name if isinstance(value, Enum) else value


def _default(model: BaseModel, key: str) -> Any:
    *way, name = key.split(".")
    owner: Any = model
    for part in way:
        owner = getattr(owner, part)
        if owner is None:
            return None
    return type(owner).model_fields[name].get_default(call_default_factory=True)


def _check_kv_dtype(args: LlmArgs, model_dtype: str | None) -> None:
    """The KV pool has the model's dtype: anything else would quantise."""
    key = "kv_cache_config.dtype"
    allowed = dict.fromkeys(name for name in ("auto", args.dtype, model_dtype) if name)
    if args.kv_cache_config.dtype not in allowed:
        expected = " or ".join(allowed)
        raise ConfigError.bad_value(key, args.kv_cache_config.dtype, f"{expected}, on the embedded engine")


def _check_tokenizer(args: LlmArgs) -> None:
    """Guided decoding reads the tokenizer in the engine's own process."""
    given = args.tokenizer
    if args.guided_decoding_backend is not None and not isinstance(given, (str, Path, type(None))):
        raise ConfigError.bad_value(
            "tokenizer",
            type(given).__name__,
            "a directory, with guided_decoding_backend on the embedded engine",
        )


def _check_ranks(args: LlmArgs) -> None:
    if args.tensor_parallel_size > 1 and args.embedded.device == "cuda":
        raise ConfigError.bad_value("embedded.device", "cuda", "cpu, with tensor_parallel_size above 1")


def _check_processors(args: LlmArgs) -> None:
    count = os.cpu_count() or 1
    wanted = args.embedded.cpu_affinity or []
    if strange := [cpu for cpu in wanted if not 0 <= cpu < count]:
        allowed = f"processors of this machine, which are 0 to {count - 1}"
        raise ConfigError.bad_value("embedded.cpu_affinity", strange, allowed)


class _Built(NamedTuple):
    """The values of one argument that the embedded engine serves, and how an error says so."""

    key: str
    values: tuple[Any, ...] = (None,)
    expected: str = "no value"


_ONE = ((1,), "1 (not yet more)")
# None where a part of the way is not set.
_OFF = ((None, False), "false")
_BUILT = (
    _Built("pipeline_parallel_size", *_ONE),
    _Built("context_parallel_size", *_ONE),
    # -1 is what no value becomes.
    _Built("moe_cluster_parallel_size", (-1, 1), "1"),
    _Built("moe_tensor_parallel_size", (-1, 1), "1"),
    _Built("moe_expert_parallel_size", (-1, 1), "1"),
    _Built("cp_config"),
    _Built("enable_lora", *_OFF),
    _Built("lora_config"),
    _Built("peft_cache_config"),
    _Built("speculative_config"),
    _Built("sparse_attention_config"),
    _Built("kv_cache_compression_config"),
    _Built("model_kwargs"),
    _Built("custom_tokenizer"),
    _Built("load_format", ("AUTO",), "auto"),
    _Built("max_beam_width", (1,), "1"),
    _Built("guided_decoding_backend", (None, "llguidance"), "llguidance"),
    _Built("batched_logits_processor"),
    _Built("gather_generation_logits", *_OFF),
    _Built("post_processor_hook"),
    _Built("generation_config", ("trtllm",), "trtllm"),
    _Built("orchestrator_type"),
    _Built("env_overrides", (None, {}), "no value; set the variables for the worker itself"),
    _Built("kv_connector_config"),
    _Built("sleep_config"),
    _Built("dwdp_config"),
    _Built("kv_cache_config.max_attention_window"),
    _Built("kv_cache_config.host_cache_size", (None, 0), "0"),
    _Built("kv_cache_config.disk_cache_size", (None, 0), "0"),
    _Built("kv_cache_config.cross_kv_cache_fraction"),
    _Built("kv_cache_config.kv_cache_event_hash_algo", ("auto", "v1_block_key"), "auto or v1_block_key"),
    _Built("kv_cache_config.kv_events_config.enable_kv_cache_events", *_OFF),
    _Built("kv_cache_config.block_reuse_config.policy", ("all_reusable",), "all_reusable"),
)

#: These tune GPUs, or another runtime. Answers are the same without them.
_NO_EFFECT = (
    # With schedule_style GENERATION_FIRST finished chunks always travel at once.
    "cache_transceiver_config.enable_pipelined_transfer",
    "gpus_per_node",
    "enable_attention_dp",
    "enable_lm_head_tp_in_adp",
    "pp_partition",
    "max_input_len",
    "num_postprocess_workers",
    "num_serve_frontends",
    "iter_stats_max_iterations",
    "request_stats_max_iterations",
    # A server's; `request_perf_metrics` has a request's measurements.
    "perf_metrics_output_dir",
    "perf_metrics_max_requests",
    "prometheus_metrics_config",
    "otlp_traces_endpoint",
    "telemetry_config",
    "batch_wait_timeout_ms",
    "batch_wait_timeout_iters",
    "batch_wait_max_tokens_ratio",
    "disable_overlap_scheduler",
    "enable_early_first_token_response",
    "attn_backend",
    "cuda_graph_config",
    "moe_config",
    "nvfp4_gemm_config",
    "attention_dp_config",
    "torch_compile_config",
    "allreduce_strategy",
    "enable_autotuner",
    "garbage_collection_gen0_threshold",
    "kv_cache_config.sink_token_length",
    "kv_cache_config.secondary_offload_min_priority",
    "kv_cache_config.attention_dp_events_gather_period_ms",
    "kv_cache_config.use_uvm",
    "kv_cache_config.use_kv_cache_manager_v2",
    "kv_cache_config.pool_ratio",
    "kv_cache_config.avg_seq_len",
    "kv_cache_config.mamba_state_config",
    "scheduler_config.use_python_scheduler",
    "scheduler_config.enable_prefix_aware_scheduling",
    # One by one: Dynamo always passes this object, with its defaults.
    "scheduler_config.dynamic_batch_config.enable_batch_size_tuning",
    "scheduler_config.dynamic_batch_config.enable_max_num_tokens_tuning",
    "scheduler_config.dynamic_batch_config.dynamic_batch_moving_average_window",
    "cache_transceiver_config.transceiver_runtime",
    "cache_transceiver_config.max_tokens_in_buffer",
    "cache_transceiver_config.kv_cache_bounce_size_mb",
)
