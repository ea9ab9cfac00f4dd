"""The arguments of LLM(...) with TensorRT-LLM's names and defaults. Marks say which values the embedded engine serves
(`Served`) and which arguments have no effect (`NO_EFFECT`). It refuses unknown names, as TensorRT-LLM does.

A setting that would change an answer is never ignored silently.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from trtllm_disagg.common.model_directory import is_hub_name, model_directory
from trtllm_disagg.engine.declared_arguments import power_of_two, python_needs_an_end, python_needs_nixl
from trtllm_disagg.engine.table import TENSORRT_LLM_BACKENDS
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.kv_transfer.transports import backends, embedded_only_backends
from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)

Args = TypeVar("Args", bound="LlmArgs")


class Served:
    """Marks an argument for which the embedded engine serves these values only."""

    def __init__(self, *values: Any, expected: str = "no value") -> None:
        """`values`: enums by name; `expected`: the error's words for them."""
        self._values = values
        self.expected = expected

    def check(self, key: str, value: Any, engine: str = "embedded") -> None:
        """Raises ConfigError for any other value."""
        value = value.name if isinstance(value, Enum) else value
        if value not in self._values:
            raise ConfigError.bad_value(key, value, f"{self.expected}, on the {engine} engine")


#: Marks an argument that tunes GPUs or another runtime and changes no answer.
NO_EFFECT = object()


#: Options of a feature that only TensorRT-LLM has; their content is not checked.
Opaque = dict[str, Any] | None
NotServed = Annotated[Opaque, Served(None)]
#: TensorRT-LLM turns None into -1.
MoeRanks = Annotated[int | None, Served(-1, 1, expected="1")]
#: Maximum size of a queue.
MAX_RECORDS = 2**31 - 1


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class KVEventsConfig(StrictModel):
    """Events pushed over ZeroMQ instead of polled."""

    enable_kv_cache_events: Annotated[bool, Served(False, expected="false")] = False
    publisher: Annotated[Literal["null", "zmq"] | None, NO_EFFECT] = None
    endpoint: Annotated[str, NO_EFFECT] = Field(default="tcp://*:5557", min_length=1)
    replay_endpoint: Annotated[str | None, NO_EFFECT] = Field(default=None, min_length=1)
    buffer_steps: Annotated[PositiveInt, NO_EFFECT] = 10_000
    hwm: Annotated[PositiveInt, NO_EFFECT] = 100_000
    max_queue_size: Annotated[PositiveInt, NO_EFFECT] = 100_000
    topic: Annotated[str, NO_EFFECT] = ""


class BlockReuseConfig(StrictModel):
    policy: Annotated[
        Literal["all_reusable", "per_request", "per_conversation"],
        Served("all_reusable", expected="all_reusable"),
    ] = "all_reusable"
    max_num_turns: Annotated[PositiveInt, NO_EFFECT] = 1


class KvCacheConfig(StrictModel):
    enable_block_reuse: bool = True
    max_tokens: PositiveInt | None = None
    max_attention_window: Annotated[list[int] | None, Served(None)] = Field(default=None, min_length=1)
    sink_token_length: Annotated[int | None, NO_EFFECT] = None
    free_gpu_memory_fraction: float | None = Field(default=0.9, ge=0, le=1)
    host_cache_size: Annotated[NonNegativeInt | None, Served(None, 0, expected="0")] = None
    disk_cache_size: Annotated[NonNegativeInt | None, Served(None, 0, expected="0")] = None
    disk_cache_path: Annotated[str | None, NO_EFFECT] = None
    cross_kv_cache_fraction: Annotated[float | None, Served(None)] = Field(default=None, ge=0, le=1)
    secondary_offload_min_priority: Annotated[int | None, NO_EFFECT] = None
    event_buffer_max_size: int = Field(default=0, ge=0, le=MAX_RECORDS)
    attention_dp_events_gather_period_ms: Annotated[int, NO_EFFECT] = 5
    kv_events_config: KVEventsConfig | None = None
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: Annotated[bool, NO_EFFECT] = False
    max_gpu_total_bytes: Annotated[NonNegativeInt, NO_EFFECT] = 0
    iteration_stats_interval: Annotated[PositiveInt, NO_EFFECT] = 1
    dtype: str = "auto"
    tokens_per_block: Annotated[PositiveInt, AfterValidator(power_of_two)] = 32
    use_kv_cache_manager_v2: Annotated[bool | Literal["auto"], NO_EFFECT] = "auto"
    kv_cache_event_hash_algo: Annotated[
        Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"],
        Served("auto", "v1_block_key", expected="auto or v1_block_key"),
    ] = "auto"
    block_reuse_config: BlockReuseConfig = Field(default_factory=BlockReuseConfig)
    pool_ratio: Annotated[list[float] | None, NO_EFFECT] = None
    avg_seq_len: Annotated[PositiveInt | None, NO_EFFECT] = None
    mamba_state_config: Annotated[Opaque, NO_EFFECT] = None
    max_util_for_resume: float = Field(default=0.95, gt=0, le=1)

    @field_validator("dtype")
    @classmethod
    def _lower_case(cls, value: str) -> str:
        return value.lower()


class CacheTransceiverConfig(StrictModel):
    """Without a backend, KV never leaves the engine."""

    backend: str | None = None
    transceiver_runtime: Annotated[
        Literal["CPP", "PYTHON", "auto"] | None, NO_EFFECT, AfterValidator(python_needs_nixl)
    ] = "auto"
    max_tokens_in_buffer: Annotated[int | None, NO_EFFECT] = None
    #: None also means 60 s: an embedded engine never holds KV for ever.
    kv_transfer_timeout_ms: Annotated[PositiveInt | None, AfterValidator(python_needs_an_end)] = 60_000
    kv_transfer_sender_future_timeout_ms: Annotated[PositiveInt | None, NO_EFFECT] = 1000
    kv_transfer_poll_interval_ms: Annotated[PositiveInt | None, NO_EFFECT] = 5000
    kv_cache_bounce_size_mb: Annotated[NonNegativeInt, NO_EFFECT] = 0
    #: GENERATION_FIRST always sends finished chunks at once.
    enable_pipelined_transfer: Annotated[bool, NO_EFFECT] = False

    @field_validator("backend")
    @classmethod
    def _is_a_backend(cls, value: str | None) -> str | None:
        known = (*TENSORRT_LLM_BACKENDS, *embedded_only_backends())
        if value is not None and value not in known:
            expected = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return value


class CapacitySchedulerPolicy(StrEnum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class ContextChunkingPolicy(StrEnum):
    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"
    FORCE_CHUNK = "FORCE_CHUNK"


class LoadFormat(Enum):
    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2
    GMS = 3


class DynamicBatchConfig(StrictModel):
    """Dynamo always passes one, with its defaults."""

    enable_batch_size_tuning: Annotated[bool, NO_EFFECT] = True
    enable_max_num_tokens_tuning: Annotated[bool, NO_EFFECT] = False
    dynamic_batch_moving_average_window: Annotated[int, NO_EFFECT] = 128


class SchedulerConfig(StrictModel):
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"
    use_python_scheduler: Annotated[bool, NO_EFFECT] = False
    enable_prefix_aware_scheduling: Annotated[bool, NO_EFFECT] = True


class CudaGraphConfig(StrictModel):
    max_batch_size: NonNegativeInt | None = None
    batch_sizes: list[int] | None = None
    enable_padding: bool = False
    mode: Literal["decode", "encode"] = "decode"


class MoeConfig(StrictModel):
    """Without WIDEEP, which TensorRT-LLM has refused since its PRs 17119 and 17797."""

    backend: Literal[
        "AUTO",
        "CUTLASS",
        "CUTEDSL",
        "TRTLLM",
        "DEEPGEMM",
        "DENSEGEMM",
        "VANILLA",
        "TRITON",
        "MARLIN",
        "MEGAMOE_DEEPGEMM",
        "MEGAMOE_CUTEDSL",
    ] = "AUTO"
    max_num_tokens: int | None = None
    load_balancer: Any = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class AttentionDpConfig(StrictModel):
    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10
    enable_kv_cache_aware_routing: bool = False
    kv_cache_routing_load_balance_weight: float = 1.0
    kv_cache_routing_match_rate_threshold: float = 0.1
    kv_cache_routing_fair_share_multiplier: float = 2.0
    kv_cache_routing_cold_start_warmup: bool = False
    kv_cache_routing_account_for_in_transfer: bool = False
    kv_cache_routing_conversation_affinity: bool = False
    kv_cache_routing_max_sessions: int = 65_536
    kv_cache_routing_new_conv_placement: Literal["round_robin", "least_queued"] = "round_robin"


class EmbeddedConfig(StrictModel):
    """Arguments that only the embedded engine has."""

    #: Threads of each rank.
    num_threads: int = Field(default=1, ge=1, le=1024)
    #: Divided among the ranks if there are enough.
    cpu_affinity: list[int] | None = Field(default=None, min_length=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: transformers: use its modules even for families that the plain forward runs.
    forward: Literal["auto", "transformers"] = "auto"
    #: dtype that holds a bfloat16 model's weights; float32 also computes in float32. auto: bfloat16 if the CPU
    #: multiplies it or memory is short, else float32.
    weights: Literal["auto", "float32", "bfloat16"] = "auto"
    #: Maximum KV tokens kept of preempted requests (MAX_UTILIZATION), else recomputed. None: a quarter of the pool.
    swap_tokens: NonNegativeInt | None = None
    #: A longer step ends the engine; its requests continue elsewhere. None: no limit.
    step_timeout_seconds: float | None = Field(default=600.0, gt=0)


class BaseLlmArgs(StrictModel):
    """The arguments of all of TensorRT-LLM's backends."""

    model: str | Path
    tokenizer: Any = None
    tokenizer_mode: Annotated[Literal["auto", "slow"], NO_EFFECT] = "auto"
    custom_tokenizer: Annotated[str | None, Served(None)] = None
    skip_tokenizer_init: bool = False
    trust_remote_code: Annotated[bool, NO_EFFECT] = False
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    model_kwargs: NotServed = None
    load_format: Annotated[LoadFormat, Served("AUTO", expected="auto")] = LoadFormat.AUTO

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: Annotated[PositiveInt, Served(1, expected="1 (not yet more)")] = 1
    context_parallel_size: Annotated[PositiveInt, Served(1, expected="1 (not yet more)")] = 1
    gpus_per_node: Annotated[PositiveInt | None, NO_EFFECT] = None
    moe_cluster_parallel_size: MoeRanks = Field(default=None, validate_default=True)
    moe_tensor_parallel_size: MoeRanks = Field(default=None, validate_default=True)
    moe_expert_parallel_size: MoeRanks = Field(default=None, validate_default=True)
    enable_attention_dp: Annotated[bool, NO_EFFECT] = False
    enable_lm_head_tp_in_adp: Annotated[bool, NO_EFFECT] = False
    pp_partition: Annotated[list[int] | None, NO_EFFECT] = None
    cp_config: NotServed = None

    enable_lora: Annotated[bool, Served(False, expected="false")] = False
    lora_config: NotServed = None
    peft_cache_config: NotServed = None
    speculative_config: NotServed = None
    sparse_attention_config: NotServed = None
    kv_cache_compression_config: NotServed = None

    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig | None = None
    enable_chunked_prefill: bool = False
    max_batch_size: PositiveInt = 2048
    max_input_len: Annotated[PositiveInt, NO_EFFECT] = 1024
    max_seq_len: PositiveInt | None = None
    max_beam_width: Annotated[PositiveInt, Served(1, expected="1")] = 1
    max_num_tokens: PositiveInt = 8192

    guided_decoding_backend: Annotated[
        Literal["xgrammar", "llguidance"] | None, Served(None, "llguidance", expected="llguidance")
    ] = None
    batched_logits_processor: Annotated[Any, Served(None)] = None
    gather_generation_logits: Annotated[bool, Served(False, expected="false")] = False
    post_processor_hook: Annotated[str | None, Served(None)] = None
    num_postprocess_workers: Annotated[NonNegativeInt, NO_EFFECT] = 0
    num_serve_frontends: Annotated[PositiveInt, NO_EFFECT] = 1
    reasoning_parser: Annotated[str | None, NO_EFFECT] = None

    iter_stats_max_iterations: Annotated[int | None, NO_EFFECT] = Field(default=None, ge=-1)
    request_stats_max_iterations: Annotated[int | None, NO_EFFECT] = Field(default=None, ge=-1)
    return_perf_metrics: bool = False
    #: For servers; a request's measurements are in `request_perf_metrics`.
    perf_metrics_output_dir: Annotated[str | None, NO_EFFECT] = None
    perf_metrics_max_requests: Annotated[NonNegativeInt, NO_EFFECT] = 0
    prometheus_metrics_config: Annotated[Opaque, NO_EFFECT] = None
    otlp_traces_endpoint: Annotated[str | None, NO_EFFECT] = None
    telemetry_config: Annotated[Opaque, NO_EFFECT] = None

    backend: Literal["pytorch"] | None = None
    orchestrator_type: Annotated[Literal["rpc", "ray"] | None, Served(None)] = None
    env_overrides: Annotated[
        dict[str, str] | None, Served(None, {}, expected="no value; set the variables for the worker itself")
    ] = None

    @field_validator("max_batch_size", "max_input_len", "max_beam_width", "max_num_tokens", mode="before")
    @classmethod
    def _none_means_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size")
    @classmethod
    def _unset_is_minus_one(cls, value: int | None) -> int:
        return -1 if value is None else value

    @field_validator("load_format", mode="before")
    @classmethod
    def _any_spelling(cls, value: Any) -> Any:
        if isinstance(value, str) and value.upper() in LoadFormat.__members__:
            return LoadFormat[value.upper()]
        if isinstance(value, (int, LoadFormat)) and not isinstance(value, bool):
            return value
        names = ", ".join(name.lower() for name in LoadFormat.__members__)
        raise ValueError(f"Input should be one of {names}")

    @field_validator("env_overrides", mode="before")
    @classmethod
    def _values_are_text(cls, value: Any) -> Any:
        return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else value


class LlmArgs(BaseLlmArgs):
    """The arguments of the PyTorch backend, which LLM(...) takes."""

    generation_config: Annotated[Literal["trtllm", "auto"], Served("trtllm", expected="trtllm")] = "trtllm"
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: Annotated[bool, NO_EFFECT] = False
    max_stats_len: int = Field(default=1000, ge=-1, le=MAX_RECORDS)
    print_iter_log: Annotated[bool, NO_EFFECT] = False
    stream_interval: PositiveInt = 1
    batch_wait_timeout_ms: Annotated[float, NO_EFFECT] = Field(default=0, ge=0)
    batch_wait_timeout_iters: Annotated[NonNegativeInt, NO_EFFECT] = 0
    batch_wait_max_tokens_ratio: Annotated[float, NO_EFFECT] = Field(default=0, ge=0, le=1)
    disable_overlap_scheduler: Annotated[bool, NO_EFFECT] = False
    enable_early_first_token_response: Annotated[bool, NO_EFFECT] = False

    attn_backend: Annotated[str, NO_EFFECT] = "TRTLLM"
    cuda_graph_config: Annotated[CudaGraphConfig | None, NO_EFFECT] = Field(default_factory=CudaGraphConfig)
    moe_config: Annotated[MoeConfig, NO_EFFECT] = Field(default_factory=MoeConfig)
    nvfp4_gemm_config: Annotated[Opaque, NO_EFFECT] = None
    attention_dp_config: Annotated[AttentionDpConfig | None, NO_EFFECT] = None
    torch_compile_config: Annotated[Opaque, NO_EFFECT] = None
    allreduce_strategy: Annotated[str | None, NO_EFFECT] = "AUTO"
    enable_autotuner: Annotated[bool, NO_EFFECT] = True
    garbage_collection_gen0_threshold: Annotated[int, NO_EFFECT] = 20_000

    kv_connector_config: Annotated[Any, Served(None)] = None
    sleep_config: Annotated[Any, Served(None)] = None
    dwdp_config: NotServed = None

    embedded: EmbeddedConfig = Field(default_factory=EmbeddedConfig)

    @model_validator(mode="before")
    @classmethod
    def _drop_removed_arguments(cls, data: Any) -> Any:
        """Old files that name the one remaining sampler in `sampler_type` still load."""
        if not isinstance(data, dict) or "sampler_type" not in data:
            return data
        if data["sampler_type"] not in ("auto", "TorchSampler", None):
            raise ValueError(f"sampler_type {data['sampler_type']!r} was removed; leave it out")
        log.warning("sampler_type was removed and has no effect")
        return {key: value for key, value in data.items() if key != "sampler_type"}


def as_plain(value: Any) -> Any:
    """Turns pydantic models into dicts, since LlmArgs accepts both."""
    return value.model_dump() if isinstance(value, BaseModel) else value


def core_args(args: LlmArgs) -> dict[str, Any]:
    """The arguments for the engine's process, JSON-safe."""
    # Excluded arguments have one allowed value, or concern the worker only.
    plain = args.model_dump(mode="json", exclude={"tokenizer", "load_format"})
    return plain | {"tokenizer": str(args.tokenizer) if isinstance(args.tokenizer, (str, Path)) else None}


def in_directory(args: Args) -> Args:
    """`args` with the model's directory instead of its name on the hub. Raises ConfigError without one."""
    directory = model_directory(str(args.model), "model", args.revision)
    return args.model_copy(update={"model": directory})


def refuse_unsupported(args: LlmArgs) -> list[str]:
    """Raise ConfigError for the first argument that the embedded engine cannot honour.

    Returns the names of set arguments without effect, for one log line.
    """
    ignored = check_marks(args)
    _check_kv_dtype(args)
    _check_tokenizer(args)
    _check_ranks(args)
    _check_processors(args)
    _check_backend(args)
    this_cpu()  # refuses an unknown level
    return ignored


def check_marks(args: LlmArgs, engine: str = "embedded") -> list[str]:
    """`refuse_unsupported` by the arguments' marks only."""
    ignored = []
    for key, value, field in _all_arguments(args):
        for mark in field.metadata:
            if isinstance(mark, Served):
                mark.check(key, value, engine)
            elif mark is NO_EFFECT and value != field.get_default(call_default_factory=True):
                ignored.append(key)
    return ignored


def _check_backend(args: LlmArgs) -> None:
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return
    if config.backend not in (allowed := backends()):
        expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}, on the embedded engine"
        raise ConfigError.bad_value("cache_transceiver_config.backend", config.backend, expected)


def _all_arguments(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """(dotted key, value, field) of each argument, also of nested ones that are set."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        yield f"{prefix}{name}", value, field
        if isinstance(value, BaseModel):
            yield from _all_arguments(value, f"{prefix}{name}.")


def _check_kv_dtype(args: LlmArgs) -> None:
    """The KV pool has the model's dtype: another one would quantise."""
    key = "kv_cache_config.dtype"
    allowed = dict.fromkeys(("auto", args.dtype))
    if args.kv_cache_config.dtype not in allowed:
        expected = " or ".join(allowed)
        raise ConfigError.bad_value(key, args.kv_cache_config.dtype, f"{expected}, on the embedded engine")


def _check_tokenizer(args: LlmArgs) -> None:
    """Guided decoding reads the tokenizer in the engine's process."""
    given = args.tokenizer
    if args.tokenizer_revision is not None and not (isinstance(given, str) and is_hub_name(given)):
        raise ConfigError.bad_value(
            "tokenizer_revision",
            args.tokenizer_revision,
            "no value unless tokenizer is a name on the hub, on the embedded engine",
        )
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
        allowed = f"this machine's processors, 0 to {count - 1}"
        raise ConfigError.bad_value("embedded.cpu_affinity", strange, allowed)
