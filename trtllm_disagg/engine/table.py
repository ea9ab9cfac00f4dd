"""The only list of engines: modules with TensorRT-LLM's LLM API. A new engine is its module and one line here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtllm_disagg.errors import ConfigError

#: TensorRT-LLM's values of cache_transceiver_config.backend; the embedded engine has one more.
TENSORRT_LLM_BACKENDS = ("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI")
#: It has no wheel for 3.11, and none on PyPI.
_WHEELS = " on Python 3.12, with NVIDIA's package index as --extra-index-url; or use NVIDIA's image"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine. `module` has the names, fields, defaults and errors of `tensorrt_llm`."""

    name: str
    module: str
    #: True: `module` has all names; False: submodules have them, as in TensorRT-LLM.
    is_flat: bool = True
    #: "module:class", pydantic: its LLM(...) arguments. Empty: TensorRT-LLM's (declared_arguments.py).
    arguments: str = ""
    #: These are all arguments: refuse other keys.
    has_known_arguments: bool = False
    #: Accepts arguments under `embedded`, and shared memory as transport.
    takes_embedded_arguments: bool = True
    #: Engine arguments that replace the worker's defaults.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: "module:function" that runs ranks above 0 under mpiexec; None: the engine has its own launcher.
    rank_server: str | None = None
    #: "module:function" that raises ConfigError before loading for a model or arguments that the engine refuses.
    model_check: str | None = None
    #: This package's extra that installs it (`pip install 'trtllm-disagg[EXTRA]'`), or empty.
    extra: str = ""
    #: Modules that must be found before importing the engine.
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """The first needed module that this environment lacks."""
        # A module put into sys.modules by hand may have no spec.
        return next(
            (name for name in self.needs if not (sys.modules.get(name) or importlib.util.find_spec(name))),
            None,
        )

    def require_installed(self) -> None:
        """Raises ConfigError naming the missing module and the command that installs it."""
        if missing := self.missing():
            raise self.not_installed(f"No module named {missing!r}")

    def not_installed(self, reason: object) -> ConfigError:
        install = f"pip install 'trtllm-disagg[{self.extra}]'{_WHEELS if self.is_tensorrt_llm else ''}"
        allowed = f"an engine that is installed ({reason}; {install})"
        return ConfigError.bad_value("--engine", self.name, allowed)

    @property
    def is_tensorrt_llm(self) -> bool:
        """TensorRT-LLM itself, not another engine with its LLM API."""
        return not self.is_flat


#: TensorRT-LLM's arguments that apply to CPUs, and the key `embedded`.
_EMBEDDED_ARGUMENTS = "trtllm_disagg.engines.embedded.params.llm_args:LlmArgs"

ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        EngineSpec(
            "tensorrt_llm",
            "tensorrt_llm",
            is_flat=False,
            takes_embedded_arguments=False,
            model_check="trtllm_disagg.engine.llm_api:check_arguments",
            extra="tensorrt-llm",
            needs=("tensorrt_llm",),
        ),
        EngineSpec(
            "embedded",
            "trtllm_disagg.engines.embedded",
            arguments=_EMBEDDED_ARGUMENTS,
            has_known_arguments=True,
            # On a CPU a step of 8192 tokens takes seconds without a cancellation or a new request. Steps of 512 compute
            # a long prompt as fast, and more than 64 requests only queue for the same cores
            # (docs/decisions/0023-load.md).
            defaults={"max_batch_size": 64, "max_num_tokens": 512, "enable_chunked_prefill": True},
            rank_server="trtllm_disagg.engines.embedded.tensor_parallel.launch:serve_as_rank",
            model_check="trtllm_disagg.engines.embedded.params.model_shape:check_arguments",
            extra="embedded",
            needs=("torch", "transformers"),
        ),
        # A GPU's step times around the embedded engine's scheduler. Needs tables, except those under `measured`.
        EngineSpec(
            "modelled",
            "trtllm_disagg.engines.modelled",
            arguments=_EMBEDDED_ARGUMENTS,
            takes_embedded_arguments=False,
            extra="modelled",
        ),
        # Generates scripted tokens, to measure and test all around an engine. `auto` never selects it.
        EngineSpec(
            "recording",
            "trtllm_disagg.engines.recording.llm",
            arguments=_EMBEDDED_ARGUMENTS,
            defaults={"recording": {}},
        ),
    )
}

#: The engine before `auto` is resolved.
UNRESOLVED = EngineSpec("auto", "")


def named(place: str) -> Any:
    """Import `place`, "module:name" of an engine."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def resolve_engine(name: str) -> str:
    """Resolve `auto`: TensorRT-LLM if installed, else the embedded engine."""
    if name != "auto":
        return name
    return "embedded" if ENGINES["tensorrt_llm"].missing() else "tensorrt_llm"
