"""An event simulation of agg and of a prefill and a decode worker with linear step times. It uses none of the product's
code, and software takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """Seconds: a step takes `step`, plus `prompt_token` per prompt token, plus `answer_token` per sequence."""

    step: float
    prompt_token: float
    answer_token: float
    #: KV bytes per token, and the link's bytes per second.
    bytes_per_token: float = 0.0
    link_bytes: float = 1.0
    latency: float = 0.0


@dataclass
class Job:
    arrival: float
    prompt: int
    answer: int
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (self.answer - 1)


def simulate_agg(gpu: Gpu, jobs: Sequence[Job], max_step_tokens: int) -> None:
    """One worker: each step has all present requests, and as much of their prompts as fits."""
    waiting = sorted(jobs, key=lambda job: job.arrival)
    left: dict[int, int] = {}
    prefilling: list[Job] = []
    decoding: list[Job] = []
    now = 0.0
    while waiting or prefilling or decoding:
        if not prefilling and not decoding:
            now = max(now, waiting[0].arrival)
        while waiting and waiting[0].arrival <= now:
            job = waiting.pop(0)
            left[id(job)] = job.prompt
            prefilling.append(job)
        room = max_step_tokens - len(decoding)
        chunks: list[tuple[Job, int]] = []
        for job in prefilling:
            if room <= 0:
                break
            chunk = min(left[id(job)], room)
            chunks.append((job, chunk))
            room -= chunk
        now += (
            gpu.step + sum(chunk for _, chunk in chunks) * gpu.prompt_token + len(decoding) * gpu.answer_token
        )
        for job in decoding:
            job.tokens.append(now)
        for job, chunk in chunks:
            left[id(job)] -= chunk
            if not left[id(job)]:
                prefilling.remove(job)
                job.tokens.append(now)
                decoding.append(job)
        decoding = [job for job in decoding if len(job.tokens) < job.answer]


def simulate_pair(gpu: Gpu, jobs: Sequence[Job], max_step_tokens: int) -> None:
    """A prefill and a decode worker; without software time both orders are equal."""
    ready: list[tuple[float, Job]] = []
    link_free = 0.0
    for job, done in _prefills(gpu, jobs, max_step_tokens):
        job.tokens.append(done)
        link_free = max(link_free, done) + job.prompt * gpu.bytes_per_token / gpu.link_bytes
        ready.append((link_free + gpu.latency, job))
    ready.sort(key=lambda pair: pair[0])
    decoding: list[Job] = []
    now = 0.0
    while ready or decoding:
        if not decoding:
            now = max(now, ready[0][0])
        while ready and ready[0][0] <= now:
            decoding.append(ready.pop(0)[1])
        now += gpu.step + len(decoding) * gpu.answer_token
        for job in decoding:
            job.tokens.append(now)
        decoding = [job for job in decoding if len(job.tokens) < job.answer]


def _prefills(gpu: Gpu, jobs: Sequence[Job], max_step_tokens: int) -> list[tuple[Job, float]]:
    """End of each prompt, in order."""
    alone = [Job(job.arrival, job.prompt, 1) for job in jobs]
    simulate_agg(gpu, alone, max_step_tokens)
    done = [(job, shadow.tokens[0]) for job, shadow in zip(jobs, alone, strict=True)]
    return sorted(done, key=lambda pair: pair[1])
