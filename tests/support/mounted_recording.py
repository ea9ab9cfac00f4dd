"""The scripted LLM under the name `tensorrt_llm`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from trtllm_disagg.engine.trtllm_version import TrtllmVersion
from trtllm_disagg.engines import embedded
from trtllm_disagg.engines.embedded.params.request_params import get_global_disagg_request_id
from trtllm_disagg.engines.recording import llm as recording
from trtllm_disagg.engines.recording.hard_edges import PESSIMISTIC, HardEdges

ROOT = "tensorrt_llm"

#: Submodule -> names that a text worker imports from it.
NAMES = {
    "": "LLM SamplingParams DisaggregatedParams",
    "llmapi": "KvCacheConfig CacheTransceiverConfig SchedulerConfig DynamicBatchConfig ConversationParams",
    "llmapi.disagg_utils": "",
    "_torch": "",
    "_torch.shared_tensor": "SharedTensorContainer",
    "disaggregated_params": "DisaggregatedParams DisaggScheduleStyle",
    "sampling_params": "SamplingParams GuidedDecodingParams",
    "scheduling_params": "SchedulingParams",
    "executor": "",
    "executor.request": "DEFAULT_REQUEST_PRIORITY",
    "executor.result": "CompletionOutput Logprob",
    "executor.utils": "RequestError",
}


#: The release that this project supports.
VERSION = "1.3.0rc29"
_IDS = "get_global_disagg_request_id"
#: llmapi/disagg_utils.py: the first release that may have the function (`pins/1.2.0rc.json` has none), and the first
#: with two arguments.
FIRST_WITH_GLOBAL_IDS = TrtllmVersion.parse("1.3.0rc1")
FIRST_WITH_PROCESS_ID = TrtllmVersion.parse("1.3.0rc22")


@contextmanager
def mounted_recording_llm(edges: HardEdges = PESSIMISTIC, version: str = VERSION) -> Iterator[ModuleType]:
    """Inside, `import tensorrt_llm` gives the stand-in; restores everything afterwards."""
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
            setattr(module, name, getattr(recording, name, None) or getattr(embedded, name))
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules[ROOT].__dict__["__version__"] = version
    if (ids := _global_ids(version)) is not None:
        setattr(sys.modules[f"{ROOT}.llmapi.disagg_utils"], _IDS, ids)
    return sys.modules[ROOT]


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == ROOT or name.startswith(f"{ROOT}.")]
    return {name: sys.modules.pop(name) for name in names}


def _id_of_machine(machine_id: int) -> int:
    """Ten bits, as before processes were part of the id."""
    if not 0 <= machine_id < 1 << 10:
        raise ValueError(f"machine_id must be in [0, 1024), got {machine_id}")
    return get_global_disagg_request_id(*divmod(machine_id, 64))


def _global_ids(version: str) -> Callable[..., int] | None:
    """`get_global_disagg_request_id` of llmapi/disagg_utils.py; None in a release without it."""
    wanted = TrtllmVersion.parse(version, "version")
    if wanted < FIRST_WITH_GLOBAL_IDS:
        return None
    return _id_of_machine if wanted < FIRST_WITH_PROCESS_ID else get_global_disagg_request_id
