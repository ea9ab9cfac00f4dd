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
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

from trtllm_disagg.engines.embedded.api.mounted_names import not_served
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
        ".api.mounted_names",
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
    return not_served(f"{ROOT}.{part}".rstrip("."), name)


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


if __name__ == "__main__":
    # The module's other copy: the embedded package asks that one, and two finders would be one too many.
    from trtllm_disagg.engines.embedded.mount import main as run

    run()
