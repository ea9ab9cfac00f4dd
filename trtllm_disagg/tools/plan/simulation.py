"""Estimates from the modelled engines' own tables how long a worker takes for a request, and simulates a layout event
by event on them, without our own software.

Steps between two events are simulated together, so an answer of 4096 tokens costs no more than one of 16.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from trtllm_disagg.engines.modelled.build import Gpus, num_kv_blocks, open_gpus
from trtllm_disagg.engines.modelled.config import ModelledArgs
from trtllm_disagg.engines.modelled.step_times import Chunk, Factors
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.slo import ENOUGH_IN_TIME, Quantity, Slo, done_share
from trtllm_disagg.tools.plan.workloads import Ask, Shape

#: How far the search for a knee goes, as factors of the first guess: a layout may keep the SLO at no rate or, with few
#: requests, at every rate.
_LOWEST, _HIGHEST = 1 / 16, 16
#: Halvings of the last doubling: they find the rate to 5 %.
_HALVINGS = 4
#: Iterations after which the batch size and the time of a request are consistent.
_ROUNDS = 8
#: Answers took up to 1.3 times `loaded_seconds`, because they also wait for prefills of other requests.
_MOST_DELAY = 1.3
_AS_IN_THE_TABLES = Factors()


@dataclass(frozen=True, slots=True)
class ModelledWorker:
    """The step times and limits of one modelled engine."""

    gpus: Gpus
    max_batch: int
    max_step_tokens: int
    pool_tokens: int

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> ModelledWorker:
        """`arguments`: those of LLM(...). Raises ConfigError for what no table covers."""
        args = ModelledArgs.model_validate(arguments)
        gpus = open_gpus(args)
        pool = num_kv_blocks(args, gpus) * args.kv_cache_config.tokens_per_block
        return cls(gpus, args.max_batch_size, args.max_num_tokens, pool)

    def prefill_seconds(self, shape: Shape) -> float:
        """Seconds to compute the prompt tokens that are not cached, in chunks."""
        prompt = round(shape.input_tokens)
        # The last token is always computed.
        done, seconds = min(round(shape.cached_tokens), prompt - 1), 0.0
        while done < prompt:
            chunk = min(prompt - done, self.max_step_tokens)
            seconds += self.step_seconds([Chunk(chunk, done)], 0, 0)
            done += chunk
        return seconds

    def decode_seconds(self, shape: Shape) -> float:
        """A request's share of the decode steps, in the largest batch that the pool holds."""
        batch = self._largest_batch(shape)
        return self.token_seconds(shape, batch) * shape.output_tokens / batch

    def loaded_seconds(self, shape: Shape, rate: float) -> float:
        """Seconds of a request at `rate` requests a second: as many run at once as arrive during one answer."""
        batch, most = 1, self._largest_batch(shape)
        for _ in range(_ROUNDS + 1):
            seconds = self.prefill_seconds(shape) + self.token_seconds(shape, batch) * shape.output_tokens
            batch = max(1, min(most, round(rate * seconds)))
        return seconds

    def _largest_batch(self, shape: Shape) -> int:
        return max(1, min(self.max_batch, int(self.pool_tokens / (shape.input_tokens + shape.output_tokens))))

    def token_seconds(self, shape: Shape, batch: int) -> float:
        """Seconds of a decode step in a batch of such requests."""
        return self.step_seconds((), batch, round(shape.input_tokens + shape.output_tokens / 2))

    def step_seconds(self, chunks: Sequence[Chunk], num_decode: int, context: int) -> float:
        parts = self.gpus.times.parts(chunks, num_decode, context)
        return parts.seconds(sum(chunk.tokens for chunk in chunks), num_decode, _AS_IN_THE_TABLES)

    def sending_seconds(self, shape: Shape) -> float:
        """Seconds to move a prompt's KV over the link."""
        facts = self.gpus.facts
        return (
            shape.input_tokens * facts.kv_bytes_per_token / facts.link_bytes_per_second / self.gpus.num_ranks
        )


def capacity(layout: Layout, shape: Shape, workers: Mapping[str, ModelledWorker]) -> float:
    """The approximate requests a second that a layout sustains, if each prefill runs alone. `workers` by role."""
    if layout.agg_workers:
        worker = workers["agg"]
        return layout.agg_workers / (worker.prefill_seconds(shape) + worker.decode_seconds(shape))
    prefill, decode = workers["prefill"], workers["decode"]
    sending = prefill.sending_seconds(shape)
    return min(
        layout.prefill_workers / max(prefill.prefill_seconds(shape), sending),
        layout.decode_workers / max(decode.decode_seconds(shape), sending),
    )


def requests_to_fill(layout: Layout, shape: Shape, workers: Mapping[str, ModelledWorker], rate: float) -> int:
    """The requests that arrive during somewhat more than two answers: only then do as many end as arrive, and a queue
    shows.
    """
    role, count = ("agg", layout.agg_workers) if layout.agg_workers else ("decode", layout.decode_workers)
    return math.ceil(2 * _MOST_DELAY * rate * workers[role].loaded_seconds(shape, rate / count))


@dataclass(slots=True)
class _Job:
    """A request at one worker."""

    #: When it may begin, in seconds.
    ready: float
    #: Tokens of KV that it holds at its end.
    tokens: int
    #: Prompt tokens to compute here, after `before` cached ones.
    prefill: int
    before: int
    #: Decode steps to do here.
    steps: int
    #: When its prefill ended, and when its last step did.
    first: float = 0.0
    end: float = 0.0


@dataclass
class _SimulatedWorker:
    """A worker that admits jobs in order of arrival, as many as its batch and its pool hold."""

    worker: ModelledWorker
    now: float = 0.0
    steps_done: int = 0
    held_tokens: int = 0
    #: Tokens of context of all decoding jobs together.
    context: int = 0
    prefilling: list[_Job] = field(default_factory=list)
    #: A heap of (the step at which the job ends, a tie breaker, job).
    decoding: list[tuple[int, int, _Job]] = field(default_factory=list)

    def serve(self, jobs: Iterable[_Job]) -> None:
        waiting = deque(sorted(jobs, key=lambda job: job.ready))
        while waiting or self._batch:
            if not self._batch:
                self.now = max(self.now, waiting[0].ready)
            while waiting and waiting[0].ready <= self.now and self._has_place_for(waiting[0]):
                self._admit(waiting.popleft())
            if self.prefilling:
                self._step_with_prompts()
            elif self.decoding:
                self._steps_until(waiting[0].ready if waiting else math.inf)
            self._end_decodes()

    @property
    def _batch(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def _has_place_for(self, job: _Job) -> bool:
        fits = self.held_tokens + job.tokens <= self.worker.pool_tokens
        return not self._batch or (self._batch < self.worker.max_batch and fits)

    def _admit(self, job: _Job) -> None:
        self.held_tokens += job.tokens
        if job.prefill:
            self.prefilling.append(job)
        else:
            self._decode(job)

    def _decode(self, job: _Job) -> None:
        heapq.heappush(self.decoding, (self.steps_done + job.steps, id(job), job))
        self.context += job.tokens - job.steps

    def _step_with_prompts(self) -> None:
        room, chunks, ended = self.worker.max_step_tokens - len(self.decoding), [], []
        for job in self.prefilling:
            tokens = min(job.prefill, room)
            if tokens <= 0:
                break
            chunks.append(Chunk(tokens, job.before))
            room -= tokens
            job.prefill, job.before = job.prefill - tokens, job.before + tokens
            if not job.prefill:
                ended.append(job)
        self._take(1, chunks)
        for job in ended:
            self.prefilling.remove(job)
            job.first = self.now
            self._decode(job)

    def _steps_until(self, next_arrival: float) -> None:
        """Takes the decode steps until the next job arrives or ends."""
        steps = self.decoding[0][0] - self.steps_done
        # A job that has arrived already has no place until another one ends.
        if self.now < next_arrival < math.inf and self._batch < self.worker.max_batch:
            seconds = self.worker.step_seconds((), len(self.decoding), self._mean_context)
            steps = min(steps, math.ceil((next_arrival - self.now) / seconds))
        self._take(steps, ())

    @property
    def _mean_context(self) -> int:
        return round(self.context / len(self.decoding)) if self.decoding else 0

    def _take(self, steps: int, chunks: Sequence[Chunk]) -> None:
        count = len(self.decoding)
        seconds = self.worker.step_seconds(chunks, count, self._mean_context + steps // 2)
        self.now += steps * seconds
        self.steps_done += steps
        self.context += steps * count

    def _end_decodes(self) -> None:
        while self.decoding and self.decoding[0][0] <= self.steps_done:
            _, _, job = heapq.heappop(self.decoding)
            job.end = self.now
            self.held_tokens -= job.tokens
            self.context -= job.tokens


def _serve(worker: ModelledWorker, count: int, jobs: Sequence[_Job]) -> None:
    """Gives the jobs to `count` workers in turn, as the router balances load."""
    for number in range(count):
        _SimulatedWorker(worker).serve(jobs[number::count])


@dataclass(frozen=True, slots=True)
class SimulatedPoint:
    """The simulated requests of a point, in order of arrival (seconds)."""

    arrivals: Sequence[float]
    #: Seconds of each request.
    times: Mapping[Quantity, Sequence[float]]

    def goodput_share(self, slo: Slo) -> float:
        """The share of the rate that is answered in time."""
        limits = [(self.times[name], limit / 1000) for name, limit in slo.limits.items()]
        in_time = mean(all(own[i] <= limit for own, limit in limits) for i in range(len(self.arrivals)))
        return min(in_time, done_share(self.arrivals, self.times["latency"]))


def simulate(layout: Layout, workers: Mapping[str, ModelledWorker], asks: Sequence[Ask]) -> SimulatedPoint:
    """Runs the requests on a layout. A prefix that an earlier request had is in a cache."""
    jobs = []
    for ask in asks:
        before = min(ask.known, ask.prompt_tokens - 1)
        tokens, steps = ask.prompt_tokens + ask.output_tokens, ask.output_tokens - 1
        jobs.append(_Job(ask.arrival, tokens, ask.prompt_tokens - before, before, steps))
    if layout.agg_workers:
        _serve(workers["agg"], layout.agg_workers, jobs)
    else:
        _serve_in_two_stages(layout, workers, asks, jobs)
    firsts = [job.first - ask.arrival for ask, job in zip(asks, jobs, strict=True)]
    latencies = [job.end - ask.arrival for ask, job in zip(asks, jobs, strict=True)]
    gaps = [
        (latency - first) / max(1, ask.output_tokens - 1)
        for ask, first, latency in zip(asks, firsts, latencies, strict=True)
    ]
    return SimulatedPoint([ask.arrival for ask in asks], {"ttft": firsts, "tpot": gaps, "latency": latencies})


def _serve_in_two_stages(
    layout: Layout, workers: Mapping[str, ModelledWorker], asks: Sequence[Ask], jobs: Sequence[_Job]
) -> None:
    """Sets the times of both stages in `jobs`. A transfer takes the sender's link out and the receiver's link in, and
    each link does one transfer after the other.
    """
    prefills = [
        _Job(job.ready, ask.prompt_tokens, job.prefill, job.before, 0)
        for ask, job in zip(asks, jobs, strict=True)
    ]
    _serve(workers["prefill"], layout.prefill_workers, prefills)
    for job, prefill in zip(jobs, prefills, strict=True):
        job.first = job.end = prefill.first
        job.prefill = 0
    # An answer of one token ends with its prefill: no KV moves.
    moved = [(number % layout.prefill_workers, job) for number, job in enumerate(jobs) if job.steps]
    out_free_at, in_free_at = [0.0] * layout.prefill_workers, [0.0] * layout.decode_workers
    latency = workers["prefill"].gpus.facts.link_latency
    for place, (sender, job) in sorted(enumerate(moved), key=lambda each: each[1][1].first):
        receiver = place % layout.decode_workers
        moving = workers["prefill"].sending_seconds(Shape(job.tokens - job.steps - 1, 0))
        end = max(job.first, out_free_at[sender], in_free_at[receiver]) + moving
        out_free_at[sender] = in_free_at[receiver] = end
        job.ready = end + latency
    _serve(workers["decode"], layout.decode_workers, [job for _, job in moved])


def knee(first_guess: float, share_at: Callable[[float], float]) -> float:
    """The highest rate, to 5 %, at which nearly all answers are in time. The search begins at `first_guess` and stays
    within _LOWEST and _HIGHEST times it. `share_at`: `SimulatedPoint.goodput_share` at a rate.
    """
    low = high = first_guess
    if share_at(first_guess) >= ENOUGH_IN_TIME:
        while share_at(high := 2 * low) >= ENOUGH_IN_TIME:
            low = high
            if low >= _HIGHEST * first_guess:
                return low
    else:
        while share_at(low := high / 2) < ENOUGH_IN_TIME:
            high = low
            if low <= _LOWEST * first_guess:
                return low
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if share_at(middle) >= ENOUGH_IN_TIME:
            low = middle
        else:
            high = middle
    return low
