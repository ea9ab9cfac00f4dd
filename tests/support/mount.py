"""The embedded engine under the name `tensorrt_llm`, for TensorRT-LLM's clients.

To run a module: python -m tests.support.mount -m dynamo.trtllm --model DIR --gpus-per-node 1 ...
In a program: call `mount_as_tensorrt_llm` before the client's import.

Names outside the tables do not exist, so that a client's `except ImportError` still works.
"""

from __future__ import annotations

import functools
import importlib
import runpy
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pydantic import BaseModel

from trtllm_disagg.engine.trtllm_version import step_gauges
from trtllm_disagg.engines.embedded.api.llm import LLM
from trtllm_disagg.engines.embedded.api.perf_metrics import FINISHED_REASON, MetricNames
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs

ROOT = "tensorrt_llm"

#: The release of this API, as clients read it.
VERSION = "1.3.0rc29+embedded"

_PARAMS = "SamplingParams GuidedDecodingParams DisaggregatedParams"
_LOGITS = "LogitsProcessor BatchedLogitsProcessor"
_OUTPUTS = "RequestOutput CompletionOutput GenerationResult Logprob RequestError"
_CONFIGS = (
    "KvCacheConfig CacheTransceiverConfig SchedulerConfig CapacitySchedulerPolicy ContextChunkingPolicy "
    "DynamicBatchConfig CudaGraphConfig KVEventsConfig"
)
_UPDATES = "update_llm_args_with_extra_options update_llm_args_with_extra_dict"

#: Submodule of tensorrt_llm -> its names; "" is tensorrt_llm itself.
MOUNTED = {
    "": f"LLM {_PARAMS} {_LOGITS} KvCacheConfig RequestError",
    "llmapi": f"LLM LlmArgs TorchLlmArgs ConversationParams {_PARAMS} {_CONFIGS} {_OUTPUTS}",
    "llmapi.llm": "LLM BaseLLM SamplingParams PreprocessedInputs RequestOutput",
    "llmapi.llm_args": f"LlmArgs TorchLlmArgs BaseLlmArgs LoadFormat TOKENIZER_ALIASES {_CONFIGS} {_UPDATES}",
    "llmapi.llm_utils": _UPDATES,
    "llmapi.tokenizer": "tokenizer_factory TransformersTokenizer TOKENIZER_ALIASES",
    "llmapi.disagg_utils": "get_global_disagg_request_id MIN_GLOBAL_ID",
    "disaggregated_params": "DisaggregatedParams DisaggScheduleStyle",
    "sampling_params": f"SamplingParams GuidedDecodingParams {_LOGITS}",
    "scheduling_params": "SchedulingParams",
    "executor": "GenerationResult RequestError",
    "executor.request": "DEFAULT_REQUEST_PRIORITY",
    "executor.result": _OUTPUTS,
    "executor.utils": "RequestError EngineDeadError",
    "metrics": "MetricsCollector MetricNames",
    "metrics.collector": "MetricsCollector",
    "metrics.enums": "MetricNames",
}

#: Clients of text and images import these, and do without them.
NOT_SERVED = {
    "": "MultimodalEncoder",
    "llmapi": "MultimodalEncoder",
    "llmapi.llm_args": "KvCacheConnectorConfig SleepConfig",
    "inputs": "create_input_processor",
    "inputs.multimodal_data": "VideoData",
    "inputs.utils": "async_load_video",
    "_torch": "",
    "_torch.shared_tensor": "SharedTensorContainer",
    "_torch.shared_tensor.shared_tensor": "SharedTensorContainer",
}

#: Our modules with these names; the first match wins.
_SOURCES = (
    "trtllm_disagg.engines.embedded",
    "trtllm_disagg.engines.embedded.params.llm_args",
    "trtllm_disagg.engines.embedded.params.request_params",
    "trtllm_disagg.engines.embedded.api.request",
    "trtllm_disagg.engines.embedded.api.perf_metrics",
    "tests.support.mount",
)


def mount_as_tensorrt_llm() -> ModuleType:
    """Make `import tensorrt_llm` give the embedded engine, also where TensorRT-LLM is installed. Idempotent."""
    if not any(isinstance(finder, _Mount) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Mount())
        # An existing module came otherwise: by hand, or from the calling folder.
        for name in [name for name in sys.modules if _part(name) is not None]:
            del sys.modules[name]
    return importlib.import_module(ROOT)


def find_name(name: str) -> Any:
    """The object `name` of any part of tensorrt_llm. Raises AttributeError without one."""
    for table, make in ((MOUNTED, _own), (NOT_SERVED, _placeholder)):
        for part, names in table.items():
            if name in names.split():
                return make(part, name)
    raise AttributeError(f"module 'trtllm_disagg.engines.embedded' has no attribute {name!r}")


class _Mount(MetaPathFinder, Loader):
    """Finds and fills the tables' modules."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        part = _part(fullname)
        parts = {*MOUNTED, *NOT_SERVED}
        if part not in parts:
            return None
        is_package = any(other.startswith(f"{part}.") for other in parts) or part == ""
        return ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        part = _part(module.__name__) or ""
        for table, make in ((MOUNTED, _own), (NOT_SERVED, _placeholder)):
            for name in table.get(part, "").split():
                setattr(module, name, make(part, name))
        if part == "":
            module.__dict__["__version__"] = VERSION
            # As in TensorRT-LLM, `import tensorrt_llm` also imports its submodules.
            for other in sorted({*MOUNTED, *NOT_SERVED} - {""}):
                importlib.import_module(f"{ROOT}.{other}")


def _part(name: str) -> str | None:
    """`a.b` of `tensorrt_llm.a.b`; None for a module that is not TensorRT-LLM's."""
    root, _, part = name.partition(".")
    return part if root == ROOT else None


def _own(part: str, name: str) -> Any:
    for source in _SOURCES:
        module = importlib.import_module(source)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{ROOT}.{part}.{name} is in the table, but none of {', '.join(_SOURCES)} has it")


@functools.cache
def _placeholder(part: str, name: str) -> type:
    """A type that can be imported, for annotations and isinstance."""
    return type(name, (), {"__module__": f"{ROOT}.{part}".rstrip(".")})


def main() -> None:
    """`-m MODULE ...`: mounts, then runs the module as `python -m` does."""
    flag, *sys.argv = sys.argv[1:]
    assert flag == "-m"
    mount_as_tensorrt_llm()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


# Names that only clients use.

BaseLLM = LLM
TorchLlmArgs = LlmArgs

#: Short names for `custom_tokenizer`, which the embedded engine refuses.
TOKENIZER_ALIASES: dict[str, str] = {}


class LogitsProcessor(ABC):
    """Clients derive from it at import. Requests with one are refused (request_params.py)."""

    @abstractmethod
    def __call__(self, req_id: Any, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None: ...


class BatchedLogitsProcessor(ABC):
    @abstractmethod
    def __call__(
        self, req_ids: Any, logits: Any, token_ids: Any, stream_ptr: Any, client_ids: Any
    ) -> None: ...


class EngineDeadError(RuntimeError):
    """Never raised: if the engine dies, requests raise RequestError and `_check_health` is False."""


# -- tokenizer


class TransformersTokenizer:
    """A transformers tokenizer that also has itself as `tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, pretrained_model_dir: str | Path, **kwargs: Any) -> TransformersTokenizer:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(pretrained_model_dir, **kwargs))

    def __call__(self, text: str, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not set yet, as in an unfinished copy
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


def tokenizer_factory(obj: Any = None, **kwargs: Any) -> Any:
    """From a model directory or a transformers tokenizer; returns anything else unchanged."""
    if isinstance(obj, (str, Path)):
        return TransformersTokenizer.from_pretrained(obj, **kwargs)
    if obj is None or isinstance(obj, TransformersTokenizer):
        return obj
    return TransformersTokenizer(obj)


# -- arguments from YAML


def update_llm_args_with_extra_dict(
    llm_args: Mapping[str, Any], llm_args_dict: Mapping[str, Any], extra_llm_api_options: str | None = None
) -> dict[str, Any]:
    """`llm_args_dict` over `llm_args`; merges only kv_cache_config, as TensorRT-LLM does."""
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
#: A millisecond to an hour, three per decade, for laptops and clusters.
_BUCKETS = [step * 10.0**power for power in range(-3, 4) for step in (1, 2.5, 5)]


class MetricsCollector:
    """The engine's statistics as Prometheus metrics, under TensorRT-LLM's names."""

    labelname_finish_reason = FINISHED_REASON

    def __init__(self, labels: dict[str, str]) -> None:
        # Imported here: only clients with metrics have it.
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = labels
        self._gauge_class = Gauge
        self._gauges: dict[str, Any] = {}
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
        for name, value in step_gauges(iteration_stats).items():
            if name not in self._gauges:
                gauge = self._gauge_class(f"trtllm_{name}", "Of the last step", list(self._labels))
                self._gauges[name] = gauge.labels(**self._labels)
            self._gauges[name].set(value)

    def log_request_metrics_dict(self, metrics_dict: Mapping[Any, Any]) -> None:
        """Record one result's metrics; empty if it was not measured."""
        for metric, histogram in self._histograms.items():
            if metric in metrics_dict:
                histogram.observe(metrics_dict[metric])
        self._tokens.inc(metrics_dict.get(MetricNames.GENERATION_TOKENS, 0))
        reason = metrics_dict.get(self.labelname_finish_reason)
        if reason is not None:
            self._finished.labels(**self._labels, **{self.labelname_finish_reason: reason}).inc()


if __name__ == "__main__":
    # Uses the imported copy of this module, as the client does: two finders would conflict.
    from tests.support.mount import main as run

    run()
