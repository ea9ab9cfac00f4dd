"""The names that we use of the module that offers the LLM API; `engines.py` says which modules there are."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.engine.engines import ENGINES
from trtllm_disagg.engine.trtllm_version import require_taken
from trtllm_disagg.errors import ConfigError

#: Where TensorRT-LLM has what a text worker needs.
_PARTS = (
    "sampling_params",
    "executor.result",
    "executor.utils",
    "llmapi.disagg_utils",
    "scheduling_params",
    "llmapi",
)


@dataclass(frozen=True, slots=True)
class LlmApi:
    """Of one engine."""

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
    #: None where it keeps no conversation on one rank of it; TensorRT-LLM does from 1.3.0rc21 on.
    conversation_params: Callable[..., Any] | None = None


def load_api(name: str) -> LlmApi:
    """Raise ConfigError when the engine is not installed, or too old."""
    try:
        if missing := ENGINES[name].missing():
            raise ModuleNotFoundError(f"No module named {missing!r}")
        module = importlib.import_module(ENGINES[name].module)
    except ModuleNotFoundError as error:
        allowed = f"an engine that is installed ({error}; pip install 'trtllm-disagg[{ENGINES[name].extra}]')"
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
    """Raises ConfigError for a model that the engine cannot serve with these arguments, where it can tell at once."""
    if (check := ENGINES[name].model_check) is not None:
        _named(check)(args)


def serve_as_rank(name: str, args: dict[str, Any]) -> bool:
    """Under mpiexec, on every rank but rank 0: take part in its engine until that ends, then True. Blocks.

    Raises ConfigError when the job has another number of ranks.
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
