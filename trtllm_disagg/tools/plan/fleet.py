"""Simulates a layout under its strategy, event by event: which worker gets a request, what it caches, computes and
moves. Uses the handlers' deciders and selection of the second stage. Our software takes no time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from trtllm_disagg.config.deciders import ALWAYS, DECIDERS, Facts, agreed, auto_rules
from trtllm_disagg.engines.modelled.step_times import Chunk
from trtllm_disagg.handlers.selection import InFlight, LeastLoaded, RoundRobin
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.simulation import Blocks, ModelledWorker, SimulatedPoint
from trtllm_disagg.tools.plan.slo import ENOUGH_IN_TIME, QUANTITIES, Quantity, Slo
from trtllm_disagg.tools.plan.workloads import Ask

#: Calls a function at a time, in seconds.
At = Callable[[float, Callable[[float], None]], None]


@dataclass(slots=True, eq=False)
class _Job:
    """A request in one worker's engine."""

    ask: Ask
    #: Called with the time when the prompt is computed here, and after the last decode step.
    wake: Callable[[float], None]
    is_prefill: bool
    steps: int
    #: Prompt tokens cached or computed.
    done: int = 0
    reserved: int = 0


class Worker:
    """An engine, and what its handlers know of peers. Admits jobs in order of arrival while the batch and the pool have
    room. The steps between two events are one run. A job without decode steps keeps its blocks.
    """

    def __init__(self, number: int, gpu: ModelledWorker, at: At) -> None:
        self.number, self.gpu, self._at = number, gpu, at
        self.blocks = Blocks(gpu.pool_tokens, gpu.block_tokens)
        #: Prompt tokens computed; requests being answered; calls without an answer.
        self.computed = self.answering = self.unanswered = 0
        self._in_flight = InFlight()
        self._selector = LeastLoaded(self._in_flight)
        self._out_free_at = self._in_free_at = 0.0
        self._waiting = deque[_Job]()
        self._prefilling: list[_Job] = []
        #: A heap of (last step, tie breaker, job), and the sum of their context tokens.
        self._decoding: list[tuple[int, int, _Job]] = []
        self._steps_done = self._context = 0
        #: The run: its begin, steps, seconds per step, prompt chunks, and the number of its end event (None: idle). A
        #: run that is cut short gets another number.
        self._begin, self._steps, self._seconds = 0.0, 0, 0.0
        self._chunks: list[tuple[_Job, int]] = []
        self._due: int | None = None
        self._numbers = itertools.count()

    def call(self, ask: Ask, peers: Sequence[Worker]) -> tuple[Worker, Callable[[], None]]:
        """Returns the peer that `--next-router kv` selects, and a function that ends the call."""
        called = {each.number: each for each in peers}
        cached = {number: each.blocks.cached(ask) for number, each in called.items()}
        chosen = self._selector.cheapest(self._selector.work(cached))
        return called[chosen], self._in_flight.enter(chosen, ask.prompt_tokens)

    def sent_at(self, now: float, receiver: Worker, tokens: int) -> float:
        """Time when the KV has arrived. Each link does one transfer at a time."""
        begin = max(now, self._out_free_at, receiver._in_free_at)
        self._out_free_at = receiver._in_free_at = begin + self.gpu.sending_seconds(tokens)
        return self._out_free_at + self.gpu.gpus.facts.link_latency

    def add(self, now: float, job: _Job) -> None:
        self._waiting.append(job)
        if self._due is None:
            self._go_on_at(now)  # after all other arrivals of this moment
        elif self._steps > 1 and self._has_place_for(self._waiting[0]):
            steps = max(1, math.ceil((now - self._begin) / self._seconds))
            if steps < self._steps:
                self._steps = steps
                self._go_on_at(self._begin + steps * self._seconds)

    def _go_on_at(self, moment: float) -> None:
        self._due = next(self._numbers)
        self._at(moment, partial(self._go_on, self._due))

    def _go_on(self, due: int, now: float) -> None:
        """Ends a run, and begins the next."""
        if due != self._due:
            return
        self._due = None
        self._end_run(now)
        while self._waiting and self._has_place_for(self._waiting[0]):
            self._admit(self._waiting.popleft())
        if not self._prefilling and not self._decoding:
            return
        count = len(self._decoding)
        self._chunks = list(self._next_chunks(self.gpu.max_step_tokens - count))
        self._steps = 1 if self._chunks else self._decoding[0][0] - self._steps_done
        chunks = [Chunk(tokens, job.done) for job, tokens in self._chunks]
        context = round(self._context / count) + self._steps // 2 if count else 0
        self._begin, self._seconds = now, self.gpu.step_seconds(chunks, count, context)
        self._go_on_at(now + self._steps * self._seconds)

    def _next_chunks(self, room: int) -> Iterator[tuple[_Job, int]]:
        for job in self._prefilling:
            tokens = min(job.ask.prompt_tokens - job.done, room)
            if tokens <= 0:
                return
            room -= tokens
            yield job, tokens

    def _end_run(self, now: float) -> None:
        self._steps_done += self._steps
        self._context += self._steps * len(self._decoding)
        chunks, self._chunks, self._steps = self._chunks, [], 0
        while self._decoding and self._decoding[0][0] <= self._steps_done:
            _, _, job = heapq.heappop(self._decoding)
            self._context -= job.ask.prompt_tokens + job.steps
            self.blocks.store(job.ask, job.steps)
            self.blocks.release(job.ask, job.reserved)
            job.wake(now)
        for job, tokens in chunks:
            job.done += tokens
            if job.done == job.ask.prompt_tokens:
                self._prefilling.remove(job)
                self.blocks.store(job.ask)
                if job.steps:
                    self._decode(job)
                job.wake(now)

    def _has_place_for(self, job: _Job) -> bool:
        batch = len(self._prefilling) + len(self._decoding)
        return not batch or (batch < self.gpu.max_batch and self.blocks.fits(job.ask, job.steps))

    def _admit(self, job: _Job) -> None:
        job.done = self.blocks.cached(job.ask)
        job.reserved = self.blocks.reserve(job.ask, job.steps)
        if job.is_prefill:
            self.computed += job.ask.prompt_tokens - job.done
            self._prefilling.append(job)
        else:
            self.blocks.store(job.ask)
            self._decode(job)

    def _decode(self, job: _Job) -> None:
        heapq.heappush(self._decoding, (self._steps_done + job.steps, next(self._numbers), job))
        self._context += job.ask.prompt_tokens


class Router:
    """The frontend's KV router. A worker's cost: the tokens to compute, and the prompts that it is answering."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._round_robin = RoundRobin()
        self._prefilling = [0] * len(workers)
        self._answering = [Blocks(math.inf, 1) for _ in workers]

    def pick(self, ask: Ask) -> tuple[Worker, Callable[[], None], Callable[[], None]]:
        """Returns the worker, and functions to call at the first token and at the end."""
        uncached = [ask.prompt_tokens - each.blocks.cached(ask) for each in self._workers]
        work = zip(self._prefilling, uncached, self._answering, strict=True)
        chosen = self._round_robin.cheapest(
            {i: waiting + own + all_.used + all_.wanted(ask) for i, (waiting, own, all_) in enumerate(work)}
        )
        tokens, answering = uncached[chosen], self._answering[chosen]
        self._prefilling[chosen] += tokens

        def has_first_token() -> None:
            self._prefilling[chosen] -= tokens

        ended = partial(answering.release, ask, answering.reserve(ask))
        return self._workers[chosen], has_first_token, ended


class Fleet:
    """All workers of a layout, and the frontend."""

    def __init__(self, layout: Layout, gpus: Mapping[str, ModelledWorker], slo: Slo | None = None) -> None:
        self.spec, self.num_late = spec_of(layout.strategy), 0
        self.limits = [(name, limit / 1000) for name, limit in slo.limits.items()] if slo else []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self.workers = {
            role: [Worker(number, gpus[role], self.at) for number in range(layout.count(role))]
            for role in self.spec.roles
        }
        self.is_prefill_first = self.spec.first_role == "prefill"
        self.router = Router(self.workers[self.spec.first_role])
        names = auto_rules(layout.decider) if self.spec.chooses_order else (layout.decider,)
        self._rules = [] if names == (ALWAYS,) else [DECIDERS[name]() for name in names]

    def at(self, moment: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), call))

    def run(self, max_late: float) -> bool:
        """Returns whether all requests ended before more than `max_late` were late."""
        while self._events and self.num_late <= max_late:
            moment, _, call = heapq.heappop(self._events)
            call(moment)
        return not self._events

    def uses_both(self, worker: Worker, ask: Ask) -> bool:
        """Whether the decider of the worker calls a worker of the other role."""
        if not self._rules or not self.spec.is_disaggregated:
            return self.spec.is_disaggregated
        uncached, peers = ask.prompt_tokens - worker.blocks.cached(ask), len(self.workers["prefill"])
        depth, max_total_tokens = max(0, worker.unanswered - peers), ask.prompt_tokens + ask.output_tokens
        facts = Facts(
            ask.prompt_tokens, uncached, depth, max_total_tokens, self.is_prefill_first, 0, 0, 0.0, None
        )
        return agreed(*(rule.decide(facts) for rule in self._rules)).both_stages

    def is_full(self, worker: Worker) -> bool:
        """A strategy that chooses the order then runs the other one, to find another decode worker."""
        return self.spec.chooses_order and worker.answering >= worker.gpu.max_batch


@dataclass(slots=True, eq=False)
class _Served:
    """One request. Times in seconds."""

    fleet: Fleet
    ask: Ask
    first: float = 0.0
    end: float = 0.0
    #: Tokens of moved KV.
    moved: int = 0
    by_one_worker: bool = True

    def begin(self) -> None:
        def wake(now: float) -> None:
            with suppress(StopIteration):
                process.send(now)

        process = self._process(wake)
        next(process)
        self.fleet.at(self.ask.arrival, wake)

    def _process(self, wake: Callable[[float], None]) -> Generator[None, float, None]:
        """Each `yield` waits for an event, and gets its time. In either order, the first token leaves before any KV
        moves.
        """
        now, fleet, ask, steps = (yield), self.fleet, self.ask, self.ask.output_tokens - 1
        entry, has_first_token, has_ended = fleet.router.pick(ask)
        self.by_one_worker = not fleet.uses_both(entry, ask)
        prefill, decode, calls = entry, entry, list[Callable[[], None]]()
        if not self.by_one_worker and not fleet.is_prefill_first:
            prefill, end_call = entry.call(ask, fleet.workers["prefill"])
            calls.append(end_call)
            entry.unanswered += 1
        is_chosen_later = not self.by_one_worker and (fleet.is_prefill_first or fleet.is_full(entry))
        entry.answering += not is_chosen_later
        job = _Job(ask, wake, True, steps if self.by_one_worker else 0)
        prefill.add(now, job)
        self.first = now = yield
        has_first_token()
        entry.unanswered -= prefill is not entry
        if is_chosen_later and steps:
            others = [each for each in fleet.workers["decode"] if each is not entry] or [entry]
            decode, end_call = prefill.call(ask, others)
            calls.append(end_call)
            decode.answering += 1
        elif calls:
            calls.pop()()  # the whole answer came from this worker
        if steps and not self.by_one_worker:
            self.moved = prefill.blocks.whole(ask.prompt_tokens) - decode.blocks.cached(ask)
            fleet.at(prefill.sent_at(now, decode, self.moved), wake)
            now = yield
            prefill.blocks.release(ask, job.reserved)
            decode.add(now, _Job(ask, wake, False, steps))
        if steps:
            now = yield
        else:
            prefill.blocks.release(ask, job.reserved)
        decode.answering -= not is_chosen_later or steps > 0
        for end_call in (*calls, has_ended):
            end_call()
        self.end = now
        fleet.num_late += any(self.times[name] > limit for name, limit in fleet.limits)

    @property
    def times(self) -> dict[Quantity, float]:
        first, latency = self.first - self.ask.arrival, self.end - self.ask.arrival
        return {
            "ttft": first,
            "tpot": (latency - first) / max(1, self.ask.output_tokens - 1),
            "latency": latency,
        }


def simulate(
    layout: Layout, gpus: Mapping[str, ModelledWorker], asks: Sequence[Ask], slo: Slo | None = None
) -> SimulatedPoint:
    """Runs the requests on a layout; with `slo`, stops when too many miss it. `gpus`: by role."""
    fleet, count = Fleet(layout, gpus, slo), len(asks)
    served = [_Served(fleet, ask) for ask in asks]
    for each in served:
        each.begin()
    is_whole = fleet.run((1 - ENOUGH_IN_TIME) * count)
    times = [each.times for each in served]
    return SimulatedPoint(
        [ask.arrival for ask in asks],
        {name: [each[name] for each in times] for name in QUANTITIES},
        computed=sum(each.computed for workers in fleet.workers.values() for each in workers) / count,
        moved=sum(each.moved for each in served) / count,
        by_one_worker=sum(each.by_one_worker for each in served) / count,
        is_whole=is_whole,
    )
