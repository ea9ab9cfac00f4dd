"""The names used of an engine's LLM API (`table.py`), and the translation of its errors."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from trtllm_disagg.engine.table import ENGINES, named
from trtllm_disagg.engine.trtllm_version import require_supported
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    EngineError,
    InvalidRequestError,
    KvTransferError,
    OverloadedError,
    PeerUnavailableError,
)

log = logging.getLogger(__name__)

#: `category` of the embedded engine's errors, equal to DisaggError.category.
_BY_CATEGORY: dict[str, type[DisaggError]] = {
    InvalidRequestError.category: InvalidRequestError,
    OverloadedError.category: OverloadedError,
    PeerUnavailableError.category: KvTransferError,
}

#: Parts of TensorRT-LLM's RequestError messages, in lower case, with their source files:
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
    # An option's type (Python binding) and range (cpp/tensorrt_llm/executor/samplingConfig.cpp).
    ("samplingconfig", InvalidRequestError),
    ("token id out of range", InvalidRequestError),  # _torch/pyexecutor/py_executor.py
    # _torch/pyexecutor/guided_decoder.py; the last line catches what remains, which is about the given guide.
    ("guided decoding error: internal error", EngineError),
    ("failed to accept last new token", EngineError),
    ("guided decoding error", InvalidRequestError),
)
#: Parts of request errors after the engine's loop has ended (_torch/pyexecutor/executor_request_queue.py and
#: py_executor.py, executor/base_worker.py). The process may live on, and report that it is healthy.
_END_MESSAGES = ("pyexecutor has already been shutdown", "event loop terminated", "event loop shut down")
#: TensorRT-LLM's submodules with the names used here.
_PARTS = (
    "sampling_params",
    "executor.result",
    "executor.utils",
    "llmapi.disagg_utils",
    "scheduling_params",
    "llmapi",
)


def translate(error: Exception, is_request_error: bool = True) -> DisaggError:
    """`is_request_error`: `error` is the engine's RequestError, not an unexpected exception."""
    message = str(error) if is_request_error else f"{type(error).__name__}: {error}"
    category = getattr(error, "category", None)
    if category is not None:
        return _BY_CATEGORY.get(category, EngineError)(message)
    text = message.lower()
    error_type = next(
        (error_type for words, error_type in _BY_WORDS if is_request_error and words in text), EngineError
    )
    return error_type(message)


def is_engine_end(error: Exception) -> bool:
    """Whether the engine has ended for all requests."""
    text = str(error).lower()
    return any(words in text for words in _END_MESSAGES)


class CompletionOutput(Protocol):
    """The used part of TensorRT-LLM's CompletionOutput: one choice's output so far."""

    index: int
    token_ids: list[int]
    #: None until the choice ends.
    finish_reason: str | None
    stop_reason: int | str | None
    #: A finished context_only request's handle on the KV.
    disaggregated_params: Any
    #: None if requests are not measured.
    request_perf_metrics: Any

    @property
    def logprobs(self) -> list[Any] | None:
        """Per token a float, or its alternatives by token id."""

    @property
    def prompt_logprobs(self) -> list[Any] | None:
        """Per prompt token its alternatives by token id."""


class RequestOutput(Protocol):
    """The used part of TensorRT-LLM's RequestOutput. Iterating yields the same object at each change."""

    @property
    def outputs(self) -> Sequence[CompletionOutput]: ...

    @property
    def prompt(self) -> str | None: ...

    @property
    def prompt_token_ids(self) -> list[int]:
        """With images: their markers expanded."""

    @property
    def finished(self) -> bool: ...

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the engine's prefix cache; None if not reported."""

    @property
    def metrics_dict(self) -> Mapping[Any, Any]: ...

    def abort(self) -> None: ...

    def aresult(self) -> Awaitable[Any]:
        """Wait for the request's end. Raises the engine's error."""

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
    #: None: no attention DP.
    scheduling_params: Callable[..., Any] | None = None
    #: None: the engine cannot keep a conversation on one rank; TensorRT-LLM can since 1.3.0rc21.
    conversation_params: Callable[..., Any] | None = None

    def id_maker(self, machine_id: int) -> Callable[[], int]:
        """TensorRT-LLM's function takes one 10-bit number up to 1.3.0rc21, later two, of 8 and 6 bits."""
        make = self.new_disagg_request_id
        if "process_id" in inspect.signature(make).parameters:
            return partial(make, *divmod(machine_id, 64))
        return partial(make, machine_id)


def load_api(name: str) -> LlmApi:
    """Raises ConfigError if the engine is not installed or too old."""
    ENGINES[name].require_installed()
    try:
        module = importlib.import_module(ENGINES[name].module)
    except ModuleNotFoundError as error:
        raise ENGINES[name].not_installed(error) from error
    except ImportError as error:  # for example libcuda.so.1 without a GPU driver
        allowed = f"an engine that can be imported on this machine ({error})"
        raise ConfigError.bad_value("--engine", name, allowed) from error
    if ENGINES[name].is_flat:
        parts: tuple[Any, ...] = (module,) * len(_PARTS)
    else:
        require_supported(module)
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
    """Raises ConfigError before loading a model that the engine cannot serve with these arguments."""
    if (check := ENGINES[name].model_check) is not None:
        named(check)(args)


def check_arguments(args: dict[str, Any]) -> None:
    """TensorRT-LLM's `check_model`, by its own declaration, which LLM(...) checks only after most of a minute."""
    try:
        declared = importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
    except (ImportError, AttributeError):  # another version
        return
    from pydantic import ValidationError  # not needed by `--help`

    try:
        declared(**copy.deepcopy(args))
    except ValidationError as errors:
        first = errors.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"])) or "engine arguments"
        raise ConfigError(f"{key}: TensorRT-LLM refuses it: {first['msg']}") from None
    except Exception as error:  # LLM(...) will report it better
        log.info("the engine's arguments could not be checked: %s: %s", type(error).__name__, error)


def serve_as_rank(name: str, args: dict[str, Any]) -> bool:
    """Under mpiexec, on every rank but 0: run this rank until the engine ends, then return True. On rank 0 or without
    mpiexec, return False at once. Raises ConfigError if the job has another number of ranks.
    """
    server = ENGINES[name].rank_server
    if server is None:
        return False
    own = args.get("embedded") or {}
    served: bool = named(server)(
        args.get("tensor_parallel_size") or 1, own.get("num_threads") or 1, os.environ
    )
    return served
