"""The modelled engine: the embedded engine with clocks in place of the model and of KV transfers.

Steps take a GPU's time (docs/how-to/simulate-gpus.md). All else is real: API, scheduler, KV blocks, prefix cache,
events, statistics, leases. Importing this imports neither torch nor the tables.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_disagg.engines import embedded
from trtllm_disagg.engines.embedded import LLM as EmbeddedLLM
from trtllm_disagg.engines.embedded.core.core_client import CoreClient
from trtllm_disagg.engines.embedded.params.llm_args import (
    EmbeddedConfig,
    check_marks,
    core_args,
    in_directory,
)
from trtllm_disagg.engines.modelled.config import ModelledArgs, checked
from trtllm_disagg.errors import ConfigError

__all__ = ["LLM", "LlmArgs"]

LlmArgs = ModelledArgs
log = logging.getLogger(__name__)

_BUILDER = "trtllm_disagg.engines.modelled.build:for_process"
#: Nothing is computed.
_NUM_THREADS = 1


class LLM(EmbeddedLLM):
    """`model`: a directory with a tokenizer; the key `modelled` names the modelled model. Raises ConfigError for what
    no table covers, and as the embedded engine does.
    """

    args: ModelledArgs

    def _read_args(self, model: str | Path, **given: Any) -> ModelledArgs:
        own = checked(given.pop("modelled", None) or {})
        args = in_directory(ModelledArgs(model=model, modelled=own, **given))
        if args.embedded != EmbeddedConfig():
            raise ConfigError.bad_value("embedded", given["embedded"], "no value, on the modelled engine")
        if ignored := check_marks(args, "modelled"):
            log.info("these settings have no effect on the modelled engine: %s", ", ".join(ignored))
        if not (Path(args.model) / "config.json").is_file():
            raise ConfigError.bad_value("model", str(args.model), "a directory with a config.json")
        # To a caller its ranks are one engine: only the core divides requests among them.
        self._has_attention_dp = args.enable_attention_dp
        return args.model_copy(update={"enable_attention_dp": False})

    def _start_core(self) -> CoreClient:
        return CoreClient(
            core_args(self.args) | {"enable_attention_dp": self._has_attention_dp},
            num_threads=_NUM_THREADS,
            builder=_BUILDER,
            on_report=self._on_report,
            on_death=self._on_death,
        )

    def _now(self) -> float:
        return time.monotonic() / self.time_scale

    @property
    def time_scale(self) -> float:
        """Factor by which its clock is slower than this machine's (modelled engine only)."""
        return self.args.modelled.time_scale


if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """The embedded engine has TensorRT-LLM's other names."""
        return getattr(embedded, name)
