"""What the embedded engine should reach, in one table. A figure is judged by the first pattern that fits its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trtllm_disagg.bench.figures import Figure, at_least, at_most


@dataclass(frozen=True, slots=True)
class Target:
    pattern: str
    judge: Callable[[str, float, str, float], Figure]
    bound: float


TARGETS = (
    # The same weights in other engines, the same minute. The 1M model of --quick is judged by nobody.
    Target("*0M float32 * prefill embedded / llama.cpp", at_least, 1.2),
    Target("*0M bfloat16 * prefill embedded / llama.cpp", at_least, 3.0),
    Target("*0M * decode b1 embedded / best peer", at_least, 1.0),
    Target("*0M * decode b8 embedded / best peer", at_least, 1.5),
    Target("*0M * decode b32 embedded / best peer", at_least, 1.9),
    # The hardware, the same minute.
    Target("450M float32 * prefill share of the matrix product's rate", at_least, 75.0),
    Target("450M bfloat16 * prefill share of the matrix product's rate", at_least, 55.0),
    Target("450M float32 * decode b1 share of the read bandwidth", at_least, 85.0),
    Target("450M bfloat16 * decode b1 share of the read bandwidth", at_least, 70.0),
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


def judged(figure: str, value: float, unit: str) -> Figure:
    """With a target when one is named for it."""
    for target in TARGETS:
        if fnmatchcase(figure, target.pattern):
            return target.judge(figure, value, unit, target.bound)
    return Figure(figure, value, unit)
