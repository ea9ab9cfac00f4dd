"""Who takes part: the embedded engine, and the peers that run the same weights on the same machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from trtllm_disagg.bench.engine import checkpoints
from trtllm_disagg.bench.engine.plan import DTYPES, Size

EMBEDDED = "embedded"
LLAMA_CPP = "llama.cpp"
_PACKAGE = "trtllm_disagg.bench.engine"


@dataclass(frozen=True, slots=True)
class Contestant:
    """`factory` is a class with prefill, decode and generate (see own_engine.py)."""

    factory: str
    #: The checkpoint in the form that it reads.
    checkpoint: Callable[[Path, Size, str], Path]
    dtypes: tuple[str, ...] = DTYPES
    #: Modules that it needs, and how they are installed.
    modules: tuple[str, ...] = ()
    install: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def absence(self, dtype: str) -> str | None:
        """Why it cannot take part."""
        if not all(find_spec(module) is not None for module in self.modules):
            return f"not installed; {self.install}"
        return None if dtype in self.dtypes else f"has no {dtype} on the CPU"


CONTESTANTS = {
    EMBEDDED: Contestant(
        f"{_PACKAGE}.own_engine:OwnEngine",
        checkpoints.safetensors,
        # As client.py starts the engine's process.
        environment={"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"},
    ),
    LLAMA_CPP: Contestant(
        f"{_PACKAGE}.llama_cpp_peer:LlamaCpp",
        checkpoints.gguf,
        modules=("llama_cpp", "gguf"),
        install="pip install llama-cpp-python gguf",
    ),
    "ctranslate2": Contestant(
        f"{_PACKAGE}.ctranslate2_peer:CTranslate2",
        checkpoints.ctranslate2,
        dtypes=("float32",),
        modules=("ctranslate2",),
        install="pip install ctranslate2",
    ),
    "transformers": Contestant(
        f"{_PACKAGE}.transformers_peer:GenerateBatch",
        checkpoints.safetensors,
        modules=("transformers",),
        install="pip install transformers",
    ),
}
PEERS = tuple(name for name in CONTESTANTS if name != EMBEDDED)
