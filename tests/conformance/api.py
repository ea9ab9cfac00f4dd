"""The module under test, by the names of TensorRT-LLM's LLM API.

TRTLLM_DISAGG_CONFORMANCE        trtllm_disagg.engines.embedded (the default), trtllm_disagg.engines.modelled, or
                                 tensorrt_llm on a machine with a GPU
TRTLLM_DISAGG_CONFORMANCE_MODEL  a model directory, which tensorrt_llm needs; the embedded engine makes its own
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from tests.support.mount import find_name

MODULE = os.environ.get("TRTLLM_DISAGG_CONFORMANCE", "trtllm_disagg.engines.embedded")
MODEL = os.environ.get("TRTLLM_DISAGG_CONFORMANCE_MODEL")

#: Where TensorRT-LLM keeps what its package does not export. The embedded engine has one module.
_SUBMODULES = (
    "llmapi",
    "llmapi.llm",
    "llmapi.llm_args",
    "llmapi.llm_utils",
    "llmapi.disagg_utils",
    "disaggregated_params",
    "sampling_params",
    "scheduling_params",
    "executor.request",
    "executor.result",
    "executor.utils",
    "metrics",
)


def find(name: str) -> Any:
    """A class, function or constant of the LLM API."""
    for part in ("", *(f".{part}" for part in _SUBMODULES)):
        try:
            found = getattr(importlib.import_module(MODULE + part), name, None)
        except ModuleNotFoundError:
            if part == "":
                raise
            continue
        if found is not None:
            return found
    if MODULE.startswith("trtllm_disagg."):
        return find_name(name)
    raise AttributeError(f"{MODULE} has no {name} anywhere")


#: Also when it is mounted as tensorrt_llm.
IS_EMBEDDED = find("LLM").__module__.startswith("trtllm_disagg.")

#: Small token ids, which every vocabulary has; longer than two blocks of 32 tokens.
PROMPT = [5 + (7 * i) % 83 for i in range(80)]
OTHER_PROMPT = [90 - (5 * i) % 71 for i in range(75)]

IS_MODELLED = find("LLM").__module__.startswith("trtllm_disagg.engines.modelled")

needs_a_model = pytest.mark.skipif(IS_MODELLED, reason="the modelled engine makes its tokens without a model")

#: Both LLMs of the session.
TOKENS_PER_BLOCK = 32
MAX_BATCH_SIZE = 8
MAX_SEQ_LEN = 512


def sampling(**fields: Any) -> Any:
    """SamplingParams of a request that ends by its max_tokens, unless told otherwise."""
    return find("SamplingParams")(**({"ignore_eos": True, "max_tokens": 8} | fields))


def disaggregated(**fields: Any) -> Any:
    return find("DisaggregatedParams")(**fields)
