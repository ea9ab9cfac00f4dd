"""The embedded engine: TensorRT-LLM's LLM API on torch, CPU by default.

Same names, fields, defaults and errors as `tensorrt_llm`, for the subset that text workers use. Importing
this does not import torch; the model runs in a process of its own.
"""

from trtllm_disagg.engines.embedded.api.llm import DEFAULT_REQUEST_PRIORITY, LLM
from trtllm_disagg.engines.embedded.api.result import (
    CompletionOutput,
    GenerationResult,
    Logprob,
    RequestError,
    RequestOutput,
)
from trtllm_disagg.engines.embedded.params.llm_args import (
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    DynamicBatchConfig,
    KvCacheConfig,
    LlmArgs,
    LoadFormat,
    SchedulerConfig,
)
from trtllm_disagg.engines.embedded.params.request_params import (
    ConversationParams,
    DisaggregatedParams,
    DisaggScheduleStyle,
    GuidedDecodingParams,
    SamplingParams,
    SchedulingParams,
    get_global_disagg_request_id,
)

__all__ = [
    "DEFAULT_REQUEST_PRIORITY",
    "LLM",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "ConversationParams",
    "CudaGraphConfig",
    "DisaggScheduleStyle",
    "DisaggregatedParams",
    "DynamicBatchConfig",
    "GenerationResult",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LlmArgs",
    "LoadFormat",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulingParams",
    "get_global_disagg_request_id",
]
