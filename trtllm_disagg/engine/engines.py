"""The one list of engines: modules that offer TensorRT-LLM's LLM API. A new engine is its module and one line here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`module` has the same names, fields, defaults and errors as `tensorrt_llm`."""

    name: str
    module: str
    #: All names in the one module; otherwise where TensorRT-LLM has them.
    is_flat: bool = True
    #: Its arguments are all known here (`embedded.params.llm_args`), so an unknown key is refused.
    has_known_arguments: bool = False
    #: It takes the arguments under `embedded`, and shared memory as a transport.
    takes_embedded_arguments: bool = True
    #: Engine arguments in place of the worker's, where the user gives none.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: "module:function" that takes part in the engine of rank 0 under mpiexec; None: it has a launcher of its own.
    rank_server: str | None = None
    #: "module:function" that raises ConfigError for a model that it cannot serve with these arguments, at once.
    model_check: str | None = None
    #: What `srun --mpi` has to be for its ranks.
    srun_mpi: str = "none"
    #: A program that runs in every rank, and in the first one the worker; empty where ranks do without.
    rank_launcher: str = ""
    #: Of this project: `pip install 'trtllm-disagg[EXTRA]'`. Empty when nothing more is needed.
    extra: str = ""
    #: Imported only when an engine is built, so they are looked for before.
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """The first module that this engine needs and this environment lacks."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), None)

    @property
    def is_tensorrt_llm(self) -> bool:
        """Not one of the engines that only offer its LLM API."""
        return not self.is_flat


ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        EngineSpec(
            "tensorrt_llm",
            "tensorrt_llm",
            is_flat=False,
            takes_embedded_arguments=False,
            srun_mpi="pmix",
            rank_launcher="trtllm-llmapi-launch",
            extra="tensorrt-llm",
        ),
        EngineSpec(
            "embedded",
            "trtllm_disagg.embedded",
            has_known_arguments=True,
            # On a CPU a step of 8192 tokens takes seconds, in which nothing can be cancelled and no other request can
            # start; steps of 512 compute a long prompt as fast, and more than 64 requests only queue for the same
            # cores (docs/decisions/0023-load.md).
            defaults={"max_batch_size": 64, "max_num_tokens": 512, "enable_chunked_prefill": True},
            rank_server="trtllm_disagg.embedded.tensor_parallel.launch:serve_as_rank",
            model_check="trtllm_disagg.embedded.params.model_shape:check_arguments",
            srun_mpi="pmi2",
            extra="embedded",
            needs=("torch", "transformers"),
        ),
        # A GPU's step times around the embedded engine's scheduler. What is not under `measured` needs the tables.
        EngineSpec("modelled", "trtllm_disagg.modelled", takes_embedded_arguments=False, extra="modelled"),
        # Makes no real tokens: for measuring and testing what is around an engine. `auto` never means it.
        EngineSpec("recording", "trtllm_disagg.testing.recording", defaults={"recording": {}}),
    )
}

#: Before `auto` is resolved, nothing is known of the engine.
UNRESOLVED = EngineSpec("auto", "")


def resolve_engine(name: str) -> str:
    """`auto` means TensorRT-LLM where it is installed, else the embedded engine."""
    if name != "auto":
        return name
    return "tensorrt_llm" if importlib.util.find_spec("tensorrt_llm") is not None else "embedded"


if __name__ == "__main__":  # for launch/disagg.sh
    print(resolve_engine(sys.argv[1]))
