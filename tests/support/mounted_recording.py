"""The scripted LLM under the name `tensorrt_llm`, for code that imports that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from trtllm_disagg.engines.embedded.mount import find_name
from trtllm_disagg.engines.recording import llm as recording
from trtllm_disagg.engines.recording.hard_edges import PESSIMISTIC, HardEdges, global_id_function

ROOT = "tensorrt_llm"

#: submodule -> its names; where TensorRT-LLM keeps what a text worker imports.
NAMES = {
    "": "LLM SamplingParams DisaggregatedParams",
    "llmapi": "KvCacheConfig CacheTransceiverConfig SchedulerConfig DynamicBatchConfig ConversationParams",
    "llmapi.disagg_utils": "",
    "disaggregated_params": "DisaggregatedParams DisaggScheduleStyle",
    "sampling_params": "SamplingParams GuidedDecodingParams",
    "scheduling_params": "SchedulingParams",
    "executor": "",
    "executor.request": "DEFAULT_REQUEST_PRIORITY",
    "executor.result": "CompletionOutput Logprob",
    "executor.utils": "RequestError",
}


#: The release that this project is written for.
VERSION = "1.3.0rc29"
_IDS = "get_global_disagg_request_id"


@contextmanager
def mounted_recording_llm(edges: HardEdges = PESSIMISTIC, version: str = VERSION) -> Iterator[ModuleType]:
    """Inside, `import tensorrt_llm` gives the stand-in; afterwards everything is as it was."""
    before, edges_before = _taken_out(), recording.LLM.next_edges
    recording.LLM.next_edges = edges
    try:
        yield _put_in(version)
    finally:
        _taken_out()
        sys.modules.update(before)
        recording.LLM.next_edges = edges_before
        recording.LLM.forget_instances()


def _put_in(version: str) -> ModuleType:
    for part, names in NAMES.items():
        module = ModuleType(f"{ROOT}.{part}" if part else ROOT)
        module.__path__ = []
        for name in names.split():
            setattr(module, name, getattr(recording, name, None) or find_name(name))
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules[ROOT].__dict__["__version__"] = version
    if (ids := global_id_function(version)) is not None:
        setattr(sys.modules[f"{ROOT}.llmapi.disagg_utils"], _IDS, ids)
    return sys.modules[ROOT]


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == ROOT or name.startswith(f"{ROOT}.")]
    return {name: sys.modules.pop(name) for name in names}
