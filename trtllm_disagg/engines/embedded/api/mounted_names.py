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
from trtllm_disagg.engines.embedded.api.perf_metrics import FINISHED_REASON, MetricNames
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


# -- metrics

#: Prometheus name -> where its value is in the engine's statistics.
_GAUGES = {
    "num_requests_running": "numActiveRequests",
    "num_requests_waiting": "numQueuedRequests",
    "max_num_active_requests": "maxNumActiveRequests",
    "kv_cache_hit_rate": "kvCacheStats.cacheHitRate",
    "kv_cache_max_blocks": "kvCacheStats.maxNumBlocks",
    "kv_cache_free_blocks": "kvCacheStats.freeNumBlocks",
    "kv_cache_used_blocks": "kvCacheStats.usedNumBlocks",
    "kv_cache_tokens_per_block": "kvCacheStats.tokensPerBlock",
    "num_context_requests": "inflightBatchingStats.numContextRequests",
    "num_generation_requests": "inflightBatchingStats.numGenRequests",
    "num_scheduled_requests": "inflightBatchingStats.numScheduledRequests",
    "total_context_tokens": "inflightBatchingStats.numCtxTokens",
}

#: Histograms of measured requests, in seconds.
_HISTOGRAMS = {
    MetricNames.E2E: "e2e_request_latency_seconds",
    MetricNames.TTFT: "time_to_first_token_seconds",
    MetricNames.TPOT: "time_per_output_token_seconds",
    MetricNames.REQUEST_QUEUE_TIME: "request_queue_time_seconds",
    MetricNames.PREFILL_TIME: "request_prefill_time_seconds",
    MetricNames.DECODE_TIME: "request_decode_time_seconds",
    MetricNames.INFERENCE_TIME: "request_inference_time_seconds",
}
#: From a millisecond to an hour, three to a decade: a laptop's engine and a cluster's have their requests in them.
_BUCKETS = [step * 10.0**power for power in range(-3, 4) for step in (1, 2.5, 5)]


class MetricsCollector:
    """The engine's statistics as Prometheus metrics, under TensorRT-LLM's names."""

    labelname_finish_reason = FINISHED_REASON

    def __init__(self, labels: dict[str, str]) -> None:
        # A client that wants metrics has it; other clients do not need it.
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = labels
        self._gauges = {
            name: Gauge(f"trtllm_{name}", path, labelnames=list(labels)).labels(**labels)
            for name, path in {**_GAUGES, "kv_cache_utilization": "used blocks / all blocks"}.items()
        }
        self._histograms = {
            metric: Histogram(
                f"trtllm_{name}", metric.value, labelnames=list(labels), buckets=_BUCKETS
            ).labels(**labels)
            for metric, name in _HISTOGRAMS.items()
        }
        self._tokens = Counter(
            "trtllm_generation_tokens_total", "Tokens of answers.", labelnames=list(labels)
        ).labels(**labels)
        self._finished = Counter(
            "trtllm_request_success_total",
            "Requests by how they finished.",
            labelnames=[*labels, self.labelname_finish_reason],
        )

    def log_iteration_stats(self, iteration_stats: Mapping[str, Any]) -> None:
        for name, path in _GAUGES.items():
            value: Any = iteration_stats
            for part in path.split("."):
                value = value.get(part, {})
            if isinstance(value, (int, float)):
                self._gauges[name].set(value)
        blocks = iteration_stats.get("kvCacheStats") or {}
        if blocks.get("maxNumBlocks"):
            self._gauges["kv_cache_utilization"].set(blocks["usedNumBlocks"] / blocks["maxNumBlocks"])

    def log_request_metrics_dict(self, metrics_dict: Mapping[Any, Any]) -> None:
        """Record the metrics of one result; they are empty when it was not measured."""
        for metric, histogram in self._histograms.items():
            if metric in metrics_dict:
                histogram.observe(metrics_dict[metric])
        self._tokens.inc(metrics_dict.get(MetricNames.GENERATION_TOKENS, 0))
        reason = metrics_dict.get(self.labelname_finish_reason)
        if reason is not None:
            self._finished.labels(**self._labels, **{self.labelname_finish_reason: reason}).inc()


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
