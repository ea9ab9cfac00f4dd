"""The names that are used of an engine's module with the LLM API (`engines.py`), and the translation of its errors."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from trtllm_disagg.engine.engines import ENGINES
from trtllm_disagg.engine.trtllm_version import require_taken
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    EngineError,
    InvalidRequestError,
    KvTransferError,
    OverloadedError,
    PeerUnavailableError,
)

#: `category` of the embedded engine's errors, equal to DisaggError.category.
_BY_CATEGORY: dict[str, type[DisaggError]] = {
    InvalidRequestError.category: InvalidRequestError,
    OverloadedError.category: OverloadedError,
    PeerUnavailableError.category: KvTransferError,
}

#: Parts of the message of TensorRT-LLM's RequestError, in lower case, with the source file that has them:
_BY_WORDS: tuple[tuple[str, type[DisaggError]], ...] = (
    # _torch/pyexecutor/py_executor.py, and _torch/disaggregation/orchestration/coordinator.py
    ("kv cache transfer", KvTransferError),
    ("kv transfer", KvTransferError),
    # The same files, for kv_transfer_timeout_ms: "Request 12 timed out".
    ("timed out", KvTransferError),
    ("default_max_tokens", InvalidRequestError),  # executor/base_worker.py, _deduce_max_tokens
    # The same after 1.3.0rc29 (PR 19457), in OpenAI's words.
    ("maximum context length", InvalidRequestError),
    ("context_length_exceeded", InvalidRequestError),
    ("should not exceed max_num_tokens", InvalidRequestError),  # llmapi/llm.py, _check_arguments
    ("must be greater than 0", InvalidRequestError),  # executor/base_worker.py, about max_tokens
    # The type of an option (its Python binding), and its range (cpp/tensorrt_llm/executor/samplingConfig.cpp).
    ("samplingconfig", InvalidRequestError),
    ("token id out of range", InvalidRequestError),  # _torch/pyexecutor/py_executor.py
    # _torch/pyexecutor/guided_decoder.py; what is left for the last line is about the guide that was given.
    ("guided decoding error: internal error", EngineError),
    ("failed to accept last new token", EngineError),
    ("guided decoding error", InvalidRequestError),
)
#: Parts of what a request is told once the engine's loop has ended (_torch/pyexecutor/executor_request_queue.py and
#: py_executor.py, executor/base_worker.py). Its process may live on, and say that it is healthy.
_END_MESSAGES = ("pyexecutor has already been shutdown", "event loop terminated", "event loop shut down")
#: The submodules of TensorRT-LLM with the names that are used here.
_PARTS = (
    "sampling_params",
    "executor.result",
    "executor.utils",
    "llmapi.disagg_utils",
    "scheduling_params",
    "llmapi",
)


def translate(error: Exception, is_request_error: bool = True) -> DisaggError:
    """`is_request_error`: `error` is the engine's RequestError, and not an unexpected exception."""
    message = str(error) if is_request_error else f"{type(error).__name__}: {error}"
    category = getattr(error, "category", None)
    if category is not None:
        return _BY_CATEGORY.get(category, EngineError)(message)
    text = message.lower()
    kind = next((kind for words, kind in _BY_WORDS if is_request_error and words in text), EngineError)
    return kind(message)


def tells_its_end(error: Exception) -> bool:
    """The engine answers no request any more."""
    text = str(error).lower()
    return any(words in text for words in _END_MESSAGES)


class CompletionOutput(Protocol):
    """The part of TensorRT-LLM's CompletionOutput that is read here: what one choice of a request has so far."""

    index: int
    token_ids: list[int]
    #: None until the choice has ended.
    finish_reason: str | None
    stop_reason: int | str | None
    #: The handle on the KV, of a finished context_only request.
    disaggregated_params: Any
    #: None where requests are not measured.
    request_perf_metrics: Any

    @property
    def logprobs(self) -> list[Any] | None:
        """For each token a float, or its alternatives by token id."""

    @property
    def prompt_logprobs(self) -> list[Any] | None:
        """For each token of the prompt its alternatives by token id."""


class RequestOutput(Protocol):
    """The part of TensorRT-LLM's RequestOutput that is read here. Iterating yields the same object at each change."""

    @property
    def outputs(self) -> Sequence[CompletionOutput]: ...

    @property
    def finished(self) -> bool: ...

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were in the engine's prefix cache; None where the engine does not report it."""

    @property
    def metrics_dict(self) -> Mapping[Any, Any]: ...

    def abort(self) -> None: ...

    def aresult(self) -> Awaitable[Any]:
        """Wait for the end of the request. Raises the engine's error for it."""

    def __aiter__(self) -> AsyncIterator[Any]: ...


@dataclass(frozen=True, slots=True)
class LlmApi:
    """The LLM API of one engine."""

    name: str
    llm: Callable[..., Any]
    sampling_params: Callable[..., Any]
    guided_decoding_params: Callable[..., Any]
    disaggregated_params: Callable[..., Any]
    logprob: Callable[..., Any]
    request_error: type[Exception]
    new_disagg_request_id: Callable[..., int]
    #: None where the engine has no attention DP.
    scheduling_params: Callable[..., Any] | None = None
    #: None where the engine cannot keep a conversation on one rank; TensorRT-LLM can from 1.3.0rc21 on.
    conversation_params: Callable[..., Any] | None = None

    def id_maker(self, machine_id: int) -> Callable[[], int]:
        """TensorRT-LLM's function takes one number of ten bits up to 1.3.0rc21, later two, of eight and six bits."""
        make = self.new_disagg_request_id
        if "process_id" in inspect.signature(make).parameters:
            return partial(make, *divmod(machine_id, 64))
        return partial(make, machine_id)


def load_api(name: str) -> LlmApi:
    """Raise ConfigError when the engine is not installed, or too old."""
    ENGINES[name].require_installed()
    try:
        module = importlib.import_module(ENGINES[name].module)
    except ModuleNotFoundError as error:
        raise ENGINES[name].not_installed(error) from error
    except ImportError as error:  # libcuda.so.1 of a machine without a GPU driver, for example
        allowed = f"an engine that can be imported on this machine ({error})"
        raise ConfigError.bad_value("--engine", name, allowed) from error
    if ENGINES[name].is_flat:
        parts: tuple[Any, ...] = (module,) * len(_PARTS)
    else:
        require_taken(module)
        parts = tuple(importlib.import_module(f"tensorrt_llm.{part}") for part in _PARTS)
    sampling, result, utils, ids, scheduling, llmapi = parts
    return LlmApi(
        name=name,
        llm=module.LLM,
        sampling_params=module.SamplingParams,
        guided_decoding_params=sampling.GuidedDecodingParams,
        disaggregated_params=module.DisaggregatedParams,
        logprob=result.Logprob,
        request_error=utils.RequestError,
        new_disagg_request_id=ids.get_global_disagg_request_id,
        scheduling_params=getattr(scheduling, "SchedulingParams", None),
        conversation_params=getattr(llmapi, "ConversationParams", None),
    )


def check_model(name: str, args: dict[str, Any]) -> None:
    """Raises ConfigError, before loading, for a model that the engine cannot serve with these arguments."""
    if (check := ENGINES[name].model_check) is not None:
        _named(check)(args)


def serve_as_rank(name: str, args: dict[str, Any]) -> bool:
    """Under mpiexec, on every rank but 0: run this rank of the engine until the engine ends, then return True.
    Returns False at once on rank 0, and without mpiexec. Raises ConfigError when the job has another number of ranks.
    """
    server = ENGINES[name].rank_server
    if server is None:
        return False
    own = args.get("embedded") or {}
    served: bool = _named(server)(
        args.get("tensor_parallel_size") or 1, own.get("num_threads") or 1, os.environ
    )
    return served


def _named(place: str) -> Callable[..., Any]:
    """`place`: module:function."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
