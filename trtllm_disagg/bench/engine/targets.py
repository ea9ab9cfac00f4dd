"""What the embedded engine should reach, in one table. A figure is judged by the first row whose pattern fits its name
and whose hardware is there; without such a row it has no target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trtllm_disagg.bench.figures import Figure, at_least, at_most
from trtllm_disagg.embedded.cpu import CpuFeatures, this_cpu


def _any(cpu: CpuFeatures) -> bool:
    return True


def _compiles(cpu: CpuFeatures) -> bool:
    return cpu.compiles


def _avx512(cpu: CpuFeatures) -> bool:
    return cpu.level == "avx512"


def _bfloat16(cpu: CpuFeatures) -> bool:
    return cpu.has_bfloat16


def _amx(cpu: CpuFeatures) -> bool:
    return cpu.has_amx


@dataclass(frozen=True, slots=True)
class Target:
    pattern: str
    judge: Callable[[str, float, str, float], Figure]
    bound: float
    #: The hardware that it is meant for.
    on: Callable[[CpuFeatures], bool] = _any


TARGETS = (
    # The same weights in other engines, the same minute. The 1M model of --quick has no targets; neither has a
    # bfloat16 model where it is computed in float32, beside peers that read half as many bytes.
    Target("*0M float32 * prefill embedded / llama.cpp", at_least, 1.2, _avx512),
    Target("*0M float32 * prefill embedded / llama.cpp", at_least, 1.0, _compiles),
    Target("*0M bfloat16 * prefill embedded / llama.cpp", at_least, 3.0, _amx),
    Target("*0M bfloat16 * prefill embedded / llama.cpp", at_least, 1.2, _bfloat16),
    *(
        Target(f"*0M {dtype} * decode {batch} embedded / best peer", at_least, bound, on)
        for dtype, on in (("float32", _avx512), ("bfloat16", _bfloat16))
        for batch, bound in (("b1", 1.0), ("b8", 1.5), ("b32", 1.9))
    ),
    *(
        Target(f"*0M float32 * decode {batch} embedded / best peer", at_least, bound, _compiles)
        for batch, bound in (("b1", 1.0), ("b8", 1.5), ("b32", 1.5))
    ),
    # The hardware, the same minute.
    Target("450M float32 * prefill share of the matrix product's rate", at_least, 75.0, _compiles),
    Target("450M bfloat16 * prefill share of the matrix product's rate", at_least, 55.0, _bfloat16),
    Target("450M float32 * decode b1 share of the read bandwidth", at_least, 85.0, _compiles),
    Target("450M bfloat16 * decode b1 share of the read bandwidth", at_least, 70.0, _bfloat16),
    # What is not the model.
    Target("*0M * scheduler, sampling and IPC, share of a step *", at_most, 5.0),
    Target("added to TTFT by the LLM API", at_most, 0.3),
    Target("* worker CPU per token", at_most, 15.0),
    # Growth: twice the work costs at most twice the time, and the pool's size nothing. A table of a million entries
    # does not fit a CPU's cache, so that a block may cost some more in it; a scan would cost a thousand times.
    Target("* step, twice the batch", at_most, 2.0),
    Target("* step, twice the context", at_most, 2.0),
    Target("* step, largest pool / smallest", at_most, 1.15),
    Target("lookup, largest pool / smallest", at_most, 3.0),
    Target("allocation, largest pool / smallest", at_most, 3.0),
    Target("* resident / (1.25 x weights + KV pool + 400 MB)", at_most, 1.0),
)


def judged(figure: str, value: float, unit: str, cpu: CpuFeatures | None = None) -> Figure:
    """With a target when one is named for it on this CPU. `cpu`: None for this machine's."""
    cpu = cpu or this_cpu()
    for target in TARGETS:
        if fnmatchcase(figure, target.pattern) and target.on(cpu):
            return target.judge(figure, value, unit, target.bound)
    return Figure(figure, value, unit)
