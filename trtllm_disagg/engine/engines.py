"""The one list of engines: modules that offer TensorRT-LLM's LLM API. A new engine is its module and one line here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

#: The values of cache_transceiver_config.backend in TensorRT-LLM; the embedded engine has one more.
TENSORRT_LLM_BACKENDS = ("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI")
#: It has no wheel for 3.11, and on PyPI none at all.
_WHEELS = " on Python 3.12, with NVIDIA's package index as --extra-index-url; or use NVIDIA's image"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine. `module` has the same names, fields, defaults and errors as `tensorrt_llm`."""

    name: str
    module: str
    #: True: `module` itself has all names; False: they are in submodules, as in TensorRT-LLM.
    is_flat: bool = True
    #: All its arguments are listed in `declared_arguments`, so other keys are refused.
    has_known_arguments: bool = False
    #: It accepts the arguments under `embedded`, and shared memory as a transport.
    takes_embedded_arguments: bool = True
    #: Defaults of engine arguments that replace the worker's defaults.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: "module:function" that runs another rank than 0 under mpiexec; None: the engine has its own launcher.
    rank_server: str | None = None
    #: "module:function" that raises ConfigError, before loading, for a model that the engine cannot serve.
    model_check: str | None = None
    #: The extra of this package that installs it (`pip install 'trtllm-disagg[EXTRA]'`); empty for none.
    extra: str = ""
    #: Modules that are looked for before the engine is imported and built.
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """The first module that this engine needs and this environment lacks."""
        # A module that was put among the imported ones by hand may have no spec.
        return next(
            (name for name in self.needs if not (sys.modules.get(name) or importlib.util.find_spec(name))),
            None,
        )

    def require_installed(self) -> None:
        """Raises ConfigError that names the module that is missing and the command that installs it."""
        if missing := self.missing():
            raise self.not_installed(f"No module named {missing!r}")

    def not_installed(self, reason: object) -> ConfigError:
        install = f"pip install 'trtllm-disagg[{self.extra}]'{_WHEELS if self.is_tensorrt_llm else ''}"
        allowed = f"an engine that is installed ({reason}; {install})"
        return ConfigError.bad_value("--engine", self.name, allowed)

    @property
    def is_tensorrt_llm(self) -> bool:
        """TensorRT-LLM itself, and not another engine with its LLM API."""
        return not self.is_flat


ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        EngineSpec(
            "tensorrt_llm",
            "tensorrt_llm",
            is_flat=False,
            takes_embedded_arguments=False,
            extra="tensorrt-llm",
            needs=("tensorrt_llm",),
        ),
        EngineSpec(
            "embedded",
            "trtllm_disagg.engines.embedded",
            has_known_arguments=True,
            # On a CPU a step of 8192 tokens takes seconds, in which nothing can be cancelled and no other request can
            # start; steps of 512 compute a long prompt as fast, and more than 64 requests only queue for the same
            # cores (docs/decisions/0023-load.md).
            defaults={"max_batch_size": 64, "max_num_tokens": 512, "enable_chunked_prefill": True},
            rank_server="trtllm_disagg.engines.embedded.tensor_parallel.launch:serve_as_rank",
            model_check="trtllm_disagg.engines.embedded.params.model_shape:check_arguments",
            extra="embedded",
            needs=("torch", "transformers"),
        ),
        # Step times of a GPU around the embedded engine's scheduler. Needs tables, except those under `measured`.
        EngineSpec(
            "modelled", "trtllm_disagg.engines.modelled", takes_embedded_arguments=False, extra="modelled"
        ),
        # Generates scripted tokens, to measure and test everything around an engine. `auto` never selects it.
        EngineSpec("recording", "trtllm_disagg.engines.recording.llm", defaults={"recording": {}}),
    )
}

#: "module:class", pydantic: the arguments of LLM(...), with TensorRT-LLM's names, types and defaults.
_ARGUMENTS = "trtllm_disagg.engines.embedded.params.llm_args:LlmArgs"


@cache
def declared_arguments() -> type[BaseModel]:
    """The arguments of LLM(...) that are known without an engine; TensorRT-LLM has more."""
    module, _, name = _ARGUMENTS.partition(":")
    declared: type[BaseModel] = getattr(importlib.import_module(module), name)
    return declared


#: Stands for the engine until `auto` is resolved.
UNRESOLVED = EngineSpec("auto", "")


def resolve_engine(name: str) -> str:
    """`auto` means TensorRT-LLM where it is installed, else the embedded engine."""
    if name != "auto":
        return name
    return "embedded" if ENGINES["tensorrt_llm"].missing() else "tensorrt_llm"
