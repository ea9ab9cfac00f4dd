"""The modelled engine: the embedded engine with a clock in place of the model, and a link's in place of KV transfer.

Step times are those of a GPU (docs/how-to/simulate-gpus.md). Everything else is real: API, scheduler, KV blocks, prefix
cache, events, statistics, leases. Importing this imports neither torch nor the tables.
"""

from typing import TYPE_CHECKING, Any

from trtllm_disagg.modelled.config import ModelledArgs as LlmArgs
from trtllm_disagg.modelled.llm import LLM

__all__ = ["LLM", "LlmArgs"]

if not TYPE_CHECKING:  # a type checker would take every name for defined

    def __getattr__(name: str) -> Any:
        """The rest of TensorRT-LLM's names is the embedded engine's."""
        from trtllm_disagg.embedded.mount import find_name

        return find_name(name)
