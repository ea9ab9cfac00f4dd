"""The arguments of LLM(...) about KV: its cache, its events, its way to other engines.

Names and defaults are TensorRT-LLM's (facts: trtllm.md section 1).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

#: That a queue can be told to hold.
MOST_RECORDS = 2**31 - 1


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class KVEventsConfig(StrictModel):
    """Events pushed over ZeroMQ by the engine itself, instead of polled."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = Field(default="tcp://*:5557", min_length=1)
    replay_endpoint: str | None = Field(default=None, min_length=1)
    buffer_steps: PositiveInt = 10_000
    hwm: PositiveInt = 100_000
    max_queue_size: PositiveInt = 100_000
    topic: str = ""


class BlockReuseConfig(StrictModel):
    policy: Literal["all_reusable", "per_request", "per_conversation"] = "all_reusable"
    max_num_turns: PositiveInt = 1


class KvCacheConfig(StrictModel):
    enable_block_reuse: bool = True
    max_tokens: PositiveInt | None = None
    max_attention_window: list[int] | None = Field(default=None, min_length=1)
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = Field(default=0.9, ge=0, le=1)
    host_cache_size: NonNegativeInt | None = None
    disk_cache_size: NonNegativeInt | None = None
    disk_cache_path: str | None = None
    cross_kv_cache_fraction: float | None = Field(default=None, ge=0, le=1)
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = Field(default=0, ge=0, le=MOST_RECORDS)
    attention_dp_events_gather_period_ms: int = 5
    kv_events_config: KVEventsConfig | None = None
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: NonNegativeInt = 0
    iteration_stats_interval: PositiveInt = 1
    dtype: str = "auto"
    tokens_per_block: PositiveInt = 32
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = "auto"
    block_reuse_config: BlockReuseConfig = Field(default_factory=BlockReuseConfig)
    pool_ratio: list[float] | None = None
    avg_seq_len: PositiveInt | None = None
    max_util_for_resume: float = Field(default=0.95, gt=0, le=1)

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("Input should be a power of two")
        return value

    @field_validator("dtype")
    @classmethod
    def _lower_case(cls, value: str) -> str:
        return value.lower()


class CacheTransceiverConfig(StrictModel):
    """Without a backend, KV never leaves the engine. SHARED_MEMORY and TLS are names of the embedded engine only."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI", "SHARED_MEMORY", "TLS"] | None = None
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = "auto"
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: PositiveInt | None = 60_000
    kv_transfer_sender_future_timeout_ms: PositiveInt | None = 1000
    kv_transfer_poll_interval_ms: PositiveInt | None = 5000
    kv_cache_bounce_size_mb: NonNegativeInt = 0
    enable_pipelined_transfer: bool = False

    @model_validator(mode="after")
    def _python_runtime_needs_nixl_and_an_end(self) -> Self:
        if self.transceiver_runtime == "PYTHON" and self.backend not in (None, "DEFAULT", "NIXL"):
            raise ValueError(f"transceiver_runtime PYTHON needs backend NIXL, not {self.backend}")
        if self.transceiver_runtime == "PYTHON" and self.kv_transfer_timeout_ms is None:
            raise ValueError("transceiver_runtime PYTHON needs a finite kv_transfer_timeout_ms")
        return self
