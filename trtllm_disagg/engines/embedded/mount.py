"""The embedded engine under the name `tensorrt_llm`, for clients that were written for TensorRT-LLM.

    python -m trtllm_disagg.engines.embedded.mount -m dynamo.trtllm --model DIR --gpus-per-node 1 ...

runs a module that way. Without this runner:

    mount_as_tensorrt_llm()   before the client is imported: in a program, in a sitecustomize.py, or in a
                              folder tensorrt_llm/ on PYTHONPATH with an __init__.py that calls it
    sys.modules["tensorrt_llm"] = sys.modules["tensorrt_llm.llmapi"] = ... = trtllm_disagg.engines.embedded
                              for every submodule that the client imports: the package has all names below

A name that is in no table does not exist, so a client's `except ImportError` still tells old from new.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import runpy
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel

from trtllm_disagg.engine.trtllm_version import step_gauges
from trtllm_disagg.engines.embedded.api.llm import LLM
from trtllm_disagg.engines.embedded.api.perf_metrics import FINISHED_REASON, MetricNames
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.errors import ConfigError

ROOT = "tensorrt_llm"

#: What clients read; the API is that of this release.
VERSION = "1.3.0rc29+embedded"

_PARAMS = "SamplingParams GuidedDecodingParams DisaggregatedParams"
_LOGITS = "LogitsProcessor BatchedLogitsProcessor"
_OUTPUTS = "RequestOutput CompletionOutput GenerationResult Logprob RequestError"
_CONFIGS = (
    "KvCacheConfig CacheTransceiverConfig SchedulerConfig CapacitySchedulerPolicy ContextChunkingPolicy "
    "DynamicBatchConfig CudaGraphConfig KVEventsConfig"
)
_UPDATES = "update_llm_args_with_extra_options update_llm_args_with_extra_dict"

#: submodule of tensorrt_llm -> the names that it offers. "" is tensorrt_llm itself.
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

#: Text clients import these, and never use them.
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

#: Where our names live; the first that has one wins.
_SOURCES = tuple(
    f"trtllm_disagg.engines.embedded{part}"
    for part in (
        "",
        ".params.llm_args",
        ".params.request_params",
        ".api.request",
        ".api.perf_metrics",
        ".mount",
    )
)


def mount_as_tensorrt_llm(*, force: bool = False) -> ModuleType:
    """From here on `import tensorrt_llm` means the embedded engine. Idempotent.

    Raises ConfigError when TensorRT-LLM is installed, unless forced: it would be hidden.
    """
    if not force and (version := _installed_version()) is not None:
        raise ConfigError(
            f"tensorrt_llm {version} is installed, and the embedded engine would hide it; use that one, "
            "or insist with force=True (--force on the command line)"
        )
    if not any(isinstance(finder, _Mount) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Mount())
        # What is there came otherwise: by hand, or it is the very folder that is calling us.
        for name in [name for name in sys.modules if _part(name) is not None]:
            del sys.modules[name]
    return importlib.import_module(ROOT)


def find_name(name: str) -> Any:
    """What any part of tensorrt_llm offers under `name`; AttributeError when none does."""
    for table, make in ((MOUNTED, _own), (NOT_SERVED, _placeholder)):
        for part, names in table.items():
            if name in names.split():
                return make(part, name)
    raise AttributeError(f"module 'trtllm_disagg.engines.embedded' has no attribute {name!r}")


class _Mount(MetaPathFinder, Loader):
    """Finds and fills the modules of the two tables."""

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
            # As with TensorRT-LLM, `import tensorrt_llm` is enough to say tensorrt_llm.llmapi.KvCacheConfig.
            for other in sorted({*MOUNTED, *NOT_SERVED} - {""}):
                importlib.import_module(f"{ROOT}.{other}")


def _part(name: str) -> str | None:
    """`a.b` of `tensorrt_llm.a.b`; None for a module that is not TensorRT-LLM's."""
    root, _, part = name.partition(".")
    return part if root == ROOT else None


def _own(part: str, name: str) -> Any:
    for source in _SOURCES:
        # Not getattr: the package would ask us in turn.
        names = vars(importlib.import_module(source))
        if name in names:
            return names[name]
    raise AttributeError(f"{ROOT}.{part}.{name} is in the table, but none of {', '.join(_SOURCES)} has it")


@functools.cache
def _placeholder(part: str, name: str) -> type:
    """It can be imported, not used."""
    return _NotServed(name, (), {"__module__": f"{ROOT}.{part}".rstrip(".")})


def _installed_version() -> str | None:
    try:
        return distribution(ROOT).version
    except PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Mounts, then runs a module as `python -m` does."""
    parser = argparse.ArgumentParser(
        prog="python -m trtllm_disagg.engines.embedded.mount",
        description="Run a client of TensorRT-LLM's LLM API on the embedded engine.",
    )
    parser.add_argument("--force", action="store_true", help="even if TensorRT-LLM is installed")
    parser.add_argument(
        "-m",
        dest="command",
        nargs=argparse.REMAINDER,
        required=True,
        metavar="MODULE ...",
        help="what to run",
    )
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("-m needs the name of a module")
    try:
        mount_as_tensorrt_llm(force=options.force)
    except ConfigError as error:
        parser.error(str(error))
    sys.argv = options.command
    runpy.run_module(options.command[0], run_name="__main__", alter_sys=True)


# Names that only clients need; nothing of ours uses them.

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


if __name__ == "__main__":
    # The module's other copy: the embedded package asks that one, and two finders would be one too many.
    from trtllm_disagg.engines.embedded.mount import main as run

    run()
