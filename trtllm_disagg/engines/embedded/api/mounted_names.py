"""Names of TensorRT-LLM that only its clients need. Nothing of ours uses them; mount.py offers them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel

from trtllm_disagg.engines.embedded.api.llm import LLM
from trtllm_disagg.engines.embedded.api.perf_metrics import FINISHED_REASON
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs

BaseLLM = LLM
TorchLlmArgs = LlmArgs

#: Short names for `custom_tokenizer`, which the embedded engine refuses anyway.
TOKENIZER_ALIASES: dict[str, str] = {}


@dataclass
class ConversationParams:
    """Tells attention-DP ranks which requests belong together. There is one rank here."""

    conversation_id: str | None = None


class LogitsProcessor(ABC):
    """Clients derive from it at import. A request that brings one is refused (request_params.py)."""

    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: Any,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None: ...


class BatchedLogitsProcessor(ABC):
    @abstractmethod
    def __call__(
        self,
        req_ids: list[int],
        logits: list[Any],
        token_ids: list[list[list[int]]],
        stream_ptr: int,
        client_ids: list[int | None],
    ) -> None: ...


class EngineDeadError(RuntimeError):
    """Never raised here: when the engine dies, requests get a RequestError and `_check_health` is False."""


# -- tokenizer


class TransformersTokenizer:
    """A transformers tokenizer, which is also reachable as `tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, pretrained_model_dir: str | Path, **kwargs: Any) -> TransformersTokenizer:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(pretrained_model_dir, **kwargs))

    def __call__(self, text: str, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not set yet, as in a copy under construction
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


def tokenizer_factory(obj: Any = None, **kwargs: Any) -> Any:
    """From a model directory or a transformers tokenizer; anything else is taken for a tokenizer already."""
    if isinstance(obj, (str, Path)):
        return TransformersTokenizer.from_pretrained(obj, **kwargs)
    if obj is None or isinstance(obj, TransformersTokenizer):
        return obj
    return TransformersTokenizer(obj)


# -- arguments from YAML


def update_llm_args_with_extra_dict(
    llm_args: Mapping[str, Any], llm_args_dict: Mapping[str, Any], extra_llm_api_options: str | None = None
) -> dict[str, Any]:
    """`llm_args_dict` over `llm_args`. kv_cache_config alone is merged, as TensorRT-LLM does it."""
    merged = {**llm_args, **llm_args_dict}
    base, update = llm_args.get("kv_cache_config"), llm_args_dict.get("kv_cache_config")
    if base is not None and isinstance(update, Mapping):
        given = base.model_dump(exclude_unset=True) if isinstance(base, BaseModel) else base
        merged["kv_cache_config"] = {**given, **update}
    return merged


def update_llm_args_with_extra_options(
    llm_args: Mapping[str, Any], extra_llm_api_options: str | None
) -> dict[str, Any]:
    if extra_llm_api_options is None:
        return dict(llm_args)
    content = yaml.safe_load(Path(extra_llm_api_options).read_text(encoding="utf-8"))
    return update_llm_args_with_extra_dict(llm_args, content or {}, extra_llm_api_options)


class MetricsCollector:
    """Has no metrics, which Dynamo's own worker would add to its own; ours has them (docs/reference/metrics.md)."""

    labelname_finish_reason = FINISHED_REASON

    def __init__(self, labels: dict[str, str]) -> None:
        """`labels` of each metric."""

    def log_iteration_stats(self, iteration_stats: Mapping[str, Any]) -> None:
        """One record of `get_stats`."""

    def log_request_metrics_dict(self, metrics_dict: Mapping[Any, Any]) -> None:
        """The metrics of one result; they are empty when it was not measured."""


# -- what the embedded engine does not have

_NOT_SERVED = "is not served by the embedded engine"


class _NotServed(type):
    """Importing, annotating and isinstance work; making one or asking one for something does not."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} {_NOT_SERVED}")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__}.{name} {_NOT_SERVED}")


def not_served(module: str, name: str) -> type:
    """A placeholder for `module.name`: it can be imported, not used."""
    return _NotServed(name, (), {"__module__": module})
