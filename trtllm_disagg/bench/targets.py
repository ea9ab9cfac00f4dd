"""What every benchmark should reach, in one table. A figure is judged by the first row with a pattern that fits its
name and with hardware that is there; without such a row it has no target.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trtllm_disagg.bench.figures import Figure

if TYPE_CHECKING:
    from trtllm_disagg.embedded.cpu_kernels.cpu import CpuFeatures

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
}
_HARDWARE: dict[str, Callable[[CpuFeatures], bool]] = {
    "any": lambda cpu: True,
    "compiled": lambda cpu: cpu.compiles,
    "avx512": lambda cpu: cpu.level == "avx512",
    "bfloat16": lambda cpu: cpu.has_bfloat16,
    "amx": lambda cpu: cpu.has_amx,
}


@dataclass(frozen=True, slots=True)
class Target:
    """`on`: a key of _HARDWARE, what the target is meant for."""

    pattern: str
    comparison: str
    bound: float
    on: str = "any"

    def applies(self, figure: str, cpu: CpuFeatures) -> bool:
        return fnmatchcase(figure, self.pattern) and _HARDWARE[self.on](cpu)

    def judge(self, figure: Figure) -> Figure:
        ok = bool(_COMPARISONS[self.comparison](figure.value, self.bound))
        return replace(figure, target=f"{self.comparison} {self.bound:g}", ok=ok)


TARGETS = (
    # bench engine. The same weights in other engines, the same minute. The 1M model of --quick has no targets; neither
    # has a bfloat16 model where it is computed in float32, beside peers that read half as many bytes.
    Target("*0M float32 * prefill embedded / llama.cpp", ">=", 1.2, "avx512"),
    Target("*0M float32 * prefill embedded / llama.cpp", ">=", 1.0, "compiled"),
    Target("*0M bfloat16 * prefill embedded / llama.cpp", ">=", 3.0, "amx"),
    Target("*0M bfloat16 * prefill embedded / llama.cpp", ">=", 1.2, "bfloat16"),
    *(
        Target(f"*0M {dtype} * decode {batch} embedded / best peer", ">=", bound, on)
        for dtype, on in (("float32", "avx512"), ("bfloat16", "bfloat16"))
        for batch, bound in (("b1", 1.0), ("b8", 1.5), ("b32", 1.9))
    ),
    *(
        Target(f"*0M float32 * decode {batch} embedded / best peer", ">=", bound, "compiled")
        for batch, bound in (("b1", 1.0), ("b8", 1.5), ("b32", 1.5))
    ),
    # The hardware, the same minute.
    Target("450M float32 * prefill share of the matrix product's rate", ">=", 75.0, "compiled"),
    Target("450M bfloat16 * prefill share of the matrix product's rate", ">=", 55.0, "bfloat16"),
    Target("450M float32 * decode b1 share of the read bandwidth", ">=", 85.0, "compiled"),
    Target("450M bfloat16 * decode b1 share of the read bandwidth", ">=", 70.0, "bfloat16"),
    # What is not the model.
    Target("*0M * scheduler, sampling and IPC, share of a step *", "<=", 5.0),
    Target("added to TTFT by the LLM API", "<=", 0.3),
    Target("*0M * worker CPU per token", "<=", 15.0),
    # Growth: twice the work costs at most twice the time, and the pool's size nothing. A table of a million entries
    # does not fit a CPU's cache, so that a block may cost some more in it; a scan would cost a thousand times.
    Target("* step, twice the batch", "<=", 2.0),
    Target("* step, twice the context", "<=", 2.0),
    Target("* step, largest pool / smallest", "<=", 1.15),
    Target("lookup, largest pool / smallest", "<=", 3.0),
    Target("allocation, largest pool / smallest", "<=", 3.0),
    Target("* resident / (1.25 x weights + KV pool + 400 MB)", "<=", 1.0),
    # bench transfer, percent. On some CPUs the system call that NIXL is built on is far from memcpy.
    *(
        Target(f"* {transport} {pattern} share of memcpy", ">=", bound)
        for transport in ("NIXL", "SHARED_MEMORY")
        for pattern, bound in (("contiguous", 85.0), ("scattered", 65.0))
    ),
    Target("* NIXL contiguous share of process_vm_readv", ">=", 95.0),
    Target("* NIXL scattered share of process_vm_readv", ">=", 95.0),
    # bench scenarios: the ratios of the post's strongest one are to be beaten at any size.
    Target("* long_prompts throughput best disaggregated/*", ">=", 1.62),
    Target("* long_prompts ttft best disaggregated/*", "<=", 0.26),
    Target("token mismatches", "==", 0),
    # bench overhead: the worker-side orders beside the chain of the frontend, and a token that a worker relays.
    Target("*_first TTFT - router", "<=", 1.0),
    Target("*_first tok/s / router", ">=", 0.9),
    Target("prefill_first prefill worker CPU per token", "<=", 30.0),
)


def judged(figure: Figure, cpu: CpuFeatures | None = None) -> Figure:
    """With a target when one is named for it on this CPU. `cpu`: None for this machine's."""
    from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu

    cpu = cpu or this_cpu()
    target = next((target for target in TARGETS if target.applies(figure.figure, cpu)), None)
    return target.judge(figure) if target else figure
