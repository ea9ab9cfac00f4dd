"""One scenario through one server: which request got which token when."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trtllm_disagg.bench.servers import Server
from trtllm_disagg.bench.workloads import Scenario
from trtllm_disagg.embedded import SamplingParams

TEMPERATURE = 1.0


@dataclass(slots=True)
class Trace:
    """One request. Seconds on the clock of the run."""

    arrived: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrived

    @property
    def latency(self) -> float:
        return self.times[-1] - self.arrived

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one repetition; times in milliseconds, but `wall` in seconds."""

    wall: float
    throughput: float
    ttft: float
    ttft_p99: float
    itl_p99: float
    latency: float

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Measures:
        wall = max(trace.times[-1] for trace in traces)
        ttft = [1000 * trace.ttft for trace in traces]
        gaps = [1000 * gap for trace in traces for gap in trace.gaps]
        return cls(
            wall=wall,
            throughput=sum(len(trace.tokens) for trace in traces) / wall,
            ttft=float(np.mean(ttft)),
            ttft_p99=float(np.percentile(ttft, 99)),
            itl_p99=float(np.percentile(gaps, 99)) if gaps else 0.0,
            latency=float(np.mean([1000 * trace.latency for trace in traces])),
        )


async def drive(server: Server, scenario: Scenario, prompts: Sequence[list[int]]) -> list[Trace]:
    """Requests come when they are due, whatever became of the earlier ones."""
    started = time.perf_counter()

    async def one(number: int, prompt: list[int]) -> Trace:
        trace = Trace(arrived=number * scenario.gap / 1000)
        await asyncio.sleep(max(0.0, trace.arrived - (time.perf_counter() - started)))
        async for tokens in server.answer(prompt, _sampling(number, scenario)):
            trace.times += [time.perf_counter() - started] * len(tokens)
            trace.tokens += tokens
        return trace

    return list(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))


def mismatched_tokens(expected: Sequence[Trace], actual: Sequence[Trace]) -> int:
    """Positions at which two runs of the same requests differ; a missing token differs."""
    return sum(
        a != b
        for one, other in zip(expected, actual, strict=True)
        for a, b in itertools.zip_longest(one.tokens, other.tokens)
    )


def _sampling(number: int, scenario: Scenario) -> SamplingParams:
    return SamplingParams(
        max_tokens=scenario.output_tokens,
        temperature=TEMPERATURE,
        seed=1000 + number,
        ignore_eos=True,
        detokenize=False,
    )
