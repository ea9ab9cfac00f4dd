"""A stand-in for `tensorrt_llm` that records every call, refuses unknown names, and answers by a script.

It takes what TensorRT-LLM's LLM API takes, for text workers. It computes
nothing: a token is a function of the prompt and of the position, so two workers that split a request give the
same tokens as one that runs it whole.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from trtllm_disagg.embedded.params.llm_args import (
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    DynamicBatchConfig,
    KvCacheConfig,
    KVEventsConfig,
    LlmArgs,
    LoadFormat,
    SchedulerConfig,
)
from trtllm_disagg.kv_transfer.transports import embedded_only_backends
from trtllm_disagg.testing.recording_result import KvStore, RequestOutput, Script
from trtllm_disagg.testing.recording_types import (
    DEFAULT_REQUEST_PRIORITY,
    CompletionOutput,
    DisaggregatedParams,
    DisaggScheduleStyle,
    GuidedDecodingParams,
    Logprob,
    RequestError,
    SamplingParams,
    SchedulingParams,
    Tokenizer,
    get_global_disagg_request_id,
)

__all__ = [
    "DEFAULT_REQUEST_PRIORITY",
    "LLM",
    "CacheTransceiverConfig",
    "Call",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DisaggScheduleStyle",
    "DisaggregatedParams",
    "DynamicBatchConfig",
    "GuidedDecodingParams",
    "KVEventsConfig",
    "KvCacheConfig",
    "LoadFormat",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulingParams",
    "Script",
    "get_global_disagg_request_id",
]

Inputs = str | Sequence[int] | Mapping[str, Any]
P = ParamSpec("P")
R = TypeVar("R")

_EMBEDDED_ONLY = "embedded"
_NUM_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class Call:
    """One call, with the arguments that were given; defaults are not listed."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def _recorded(method: Callable[Concatenate[LLM, P], R]) -> Callable[Concatenate[LLM, P], R]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def recorded(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given["self"]
        self.calls.append(Call(method.__name__, given))
        return method(self, *args, **kwargs)

    return recorded


class LLM:
    """Give it scripts, then look at `calls`. `LLM.instances` lists those that the tested code has built."""

    instances: ClassVar[list[LLM]] = []
    #: One process holds both workers of a pair in a test, so KV that is waiting for a decode lives here.
    kv_store: ClassVar[KvStore] = KvStore()

    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        given = locals() | kwargs
        del given["self"], given["kwargs"]
        if _EMBEDDED_ONLY in given:
            raise ValueError(f"LLM() got an unknown argument {_EMBEDDED_ONLY!r}")
        self.args = LlmArgs.model_validate(given)
        if self._backend in embedded_only_backends():
            raise ValueError(
                f"cache_transceiver_config.backend {self._backend!r} is not one of TensorRT-LLM's"
            )
        self.calls = [Call("LLM", _without_defaults(given))]
        self.scripts: deque[Script] = deque()
        self.results: list[RequestOutput] = []
        #: What the next drain yields.
        self.kv_cache_events: list[dict[str, Any]] = []
        self.stats: list[dict[str, Any]] = []
        self.is_shut_down = False
        #: What `_check_health` says.
        self.is_healthy = True
        LLM.instances.append(self)

    @classmethod
    def forget_instances(cls) -> None:
        """Start a new test."""
        cls.instances.clear()
        cls.kv_store.clear()

    def calls_of(self, name: str) -> list[dict[str, Any]]:
        """The arguments of every call of one method, in order."""
        return [call.arguments for call in self.calls if call.name == name]

    @_recorded
    def generate_async(
        self,
        inputs: Inputs,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: SchedulingParams | None = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = DEFAULT_REQUEST_PRIORITY,
    ) -> RequestOutput:
        if self.is_shut_down:
            raise RuntimeError("LLM is shutting down")
        prompt, token_ids = _read_inputs(inputs)
        sampling = sampling_params if sampling_params is not None else SamplingParams()
        self._check_request(token_ids, sampling, disaggregated_params, priority)
        result = RequestOutput(
            prompt=prompt,
            prompt_token_ids=token_ids,
            sampling=sampling,
            disaggregated_params=disaggregated_params,
            streaming=streaming,
            script=self.scripts.popleft() if self.scripts else Script(),
            kv_store=LLM.kv_store,
            python_transceiver=self._transceiver_runtime == "PYTHON",
        )
        self.results.append(result)
        return result

    @_recorded
    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        if not self.args.kv_cache_config.event_buffer_max_size:
            raise RuntimeError("KV cache events need kv_cache_config.event_buffer_max_size above 0")
        return _drain(self.kv_cache_events)

    @_recorded
    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        if not self.args.enable_iter_perf_stats:
            raise RuntimeError("iteration statistics need enable_iter_perf_stats")
        return _drain(self.stats)

    @_recorded
    def get_kv_cache_capacity(self) -> dict[str, int]:
        return {"maxNumBlocks": _NUM_BLOCKS, "tokensPerBlock": self.args.kv_cache_config.tokens_per_block}

    @_recorded
    def shutdown(self) -> None:
        self.is_shut_down = True

    def _check_health(self) -> bool:
        """Not public in TensorRT-LLM either; Dynamo's engine monitor asks it."""
        return self.is_healthy and not self.is_shut_down

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.args.skip_tokenizer_init else Tokenizer()

    @property
    def _backend(self) -> str | None:
        transceiver = self.args.cache_transceiver_config
        return transceiver.backend if transceiver is not None else None

    @property
    def _transceiver_runtime(self) -> str | None:
        transceiver = self.args.cache_transceiver_config
        return transceiver.transceiver_runtime if transceiver is not None else None

    def _check_request(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        disaggregated_params: DisaggregatedParams | None,
        priority: float,
    ) -> None:
        """What TensorRT-LLM refuses at once, and here also what it would only trip over later."""
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(sampling).__name__}")
        if not 0 <= priority <= 1:
            raise ValueError(f"priority must be in [0, 1], got {priority}")
        if sampling.n > self.args.max_batch_size:
            raise ValueError(f"n ({sampling.n}) exceeds max_batch_size ({self.args.max_batch_size})")
        if self.args.max_seq_len is not None and len(token_ids) >= self.args.max_seq_len:
            raise ValueError(f"prompt length {len(token_ids)} exceeds max_seq_len ({self.args.max_seq_len})")
        if disaggregated_params is not None:
            self._check_disaggregated_params(disaggregated_params, sampling)

    def _check_disaggregated_params(self, disaggregated_params: object, sampling: SamplingParams) -> None:
        if not isinstance(disaggregated_params, DisaggregatedParams):
            kind = type(disaggregated_params).__name__
            raise TypeError(f"disaggregated_params must be DisaggregatedParams, got {kind}")
        split = disaggregated_params.request_type in ("context_only", "generation_only")
        if split and self._backend is None:
            raise ValueError(f"{disaggregated_params.request_type} needs cache_transceiver_config.backend")
        if split and sampling.n != 1:
            raise ValueError(f"{disaggregated_params.request_type} takes one choice, got n={sampling.n}")


def _without_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(LLM.__init__).parameters
    return {
        name: value
        for name, value in given.items()
        if name not in parameters or value != parameters[name].default
    }


def _read_inputs(inputs: object) -> tuple[str | None, list[int]]:
    if isinstance(inputs, Mapping):
        if "prompt_token_ids" in inputs:
            return inputs.get("prompt"), list(inputs["prompt_token_ids"])
        inputs = inputs.get("prompt")
    if isinstance(inputs, str):
        # No tokenizer: characters are as good as tokens.
        return inputs, [ord(character) for character in inputs]
    if isinstance(inputs, list) and all(isinstance(token, int) for token in inputs):
        return None, list(inputs)
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")


async def _drain(items: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    while items:
        yield items.pop(0)
