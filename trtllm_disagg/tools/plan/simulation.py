"""Models one worker: request times from the engine's tables, and KV blocks. Finds the highest rate of a layout
from points that `fleet.py` simulates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.engines.modelled.build import Gpus, num_kv_blocks, open_gpus
from trtllm_disagg.engines.modelled.config import ModelledArgs
from trtllm_disagg.engines.modelled.step_times import Chunk, Factors
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.slo import ENOUGH_IN_TIME, Quantity, Slo, done_share
from trtllm_disagg.tools.plan.workloads import Ask, Shape

#: How far the search for a knee goes from the first guess, in doublings, and its parts per doubling. A layout may keep
#: the SLO at no rate or, with few requests, at every rate.
_FARTHEST, PRECISE = 4.0, 16
#: Iterations until batch size and request time are consistent.
_ROUNDS = 8
#: Answers took up to 1.3 times `loaded_seconds`, since they also wait for other prefills.
_MAX_DELAY = 1.3
_AS_IN_THE_TABLES = Factors()


@dataclass(frozen=True, slots=True)
class ModelledWorker:
    """Step times and limits of a modelled engine."""

    gpus: Gpus
    max_batch: int
    max_step_tokens: int
    pool_tokens: int
    block_tokens: int

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> ModelledWorker:
        """`arguments`: of LLM(...). Raises ConfigError when no table covers them."""
        args = ModelledArgs.model_validate(arguments)
        gpus = open_gpus(args)
        size = args.kv_cache_config.tokens_per_block
        return cls(gpus, args.max_batch_size, args.max_num_tokens, num_kv_blocks(args, gpus) * size, size)

    def prefill_seconds(self, shape: Shape) -> float:
        """Seconds to compute the uncached prompt tokens, in chunks."""
        prompt = round(shape.input_tokens)
        # The last token is always computed.
        done, seconds = min(round(shape.cached_tokens), prompt - 1), 0.0
        while done < prompt:
            chunk = min(prompt - done, self.max_step_tokens)
            seconds += self.step_seconds([Chunk(chunk, done)], 0, 0)
            done += chunk
        return seconds

    def decode_seconds(self, shape: Shape) -> float:
        """A request's share of the decode steps in the largest batch that the pool holds."""
        batch = self._largest_batch(shape)
        return self.token_seconds(shape, batch) * shape.output_tokens / batch

    def loaded_seconds(self, shape: Shape, rate: float) -> float:
        """Seconds per request at `rate` requests/s. The batch: all arrivals during one answer."""
        batch, limit = 1, self._largest_batch(shape)
        for _ in range(_ROUNDS + 1):
            seconds = self.prefill_seconds(shape) + self.token_seconds(shape, batch) * shape.output_tokens
            batch = max(1, min(limit, round(rate * seconds)))
        return seconds

    def _largest_batch(self, shape: Shape) -> int:
        return max(1, min(self.max_batch, int(self.pool_tokens / (shape.input_tokens + shape.output_tokens))))

    def token_seconds(self, shape: Shape, batch: int) -> float:
        """Seconds per decode step in a batch of such requests."""
        return self.step_seconds((), batch, round(shape.input_tokens + shape.output_tokens / 2))

    def step_seconds(self, chunks: Sequence[Chunk], num_decode: int, context: int) -> float:
        # Rounded, so that similar contexts share one table lookup.
        parts = self.gpus.times.parts(
            chunks, num_decode, max(1, round(context / 16) * 16) if num_decode else 0
        )
        return parts.seconds(sum(chunk.tokens for chunk in chunks), num_decode, _AS_IN_THE_TABLES)

    def sending_seconds(self, tokens: float) -> float:
        """Seconds to move the KV of `tokens` over the link."""
        facts = self.gpus.facts
        return tokens * facts.kv_bytes_per_token / facts.link_bytes_per_second / self.gpus.num_ranks


def capacity(layout: Layout, shape: Shape, workers: Mapping[str, ModelledWorker]) -> float:
    """The approximate requests/s that a layout sustains, if each prefill runs alone. `workers`: by role."""
    if layout.agg_workers:
        worker = workers["agg"]
        return layout.agg_workers / (worker.prefill_seconds(shape) + worker.decode_seconds(shape))
    prefill, decode = workers["prefill"], workers["decode"]
    sending = prefill.sending_seconds(shape.input_tokens)
    return min(
        layout.prefill_workers / max(prefill.prefill_seconds(shape), sending),
        layout.decode_workers / max(decode.decode_seconds(shape), sending),
    )


def requests_to_fill(layout: Layout, shape: Shape, workers: Mapping[str, ModelledWorker], rate: float) -> int:
    """The arrivals during more than two answers: a queue only shows when as many requests end as arrive."""
    role, count = ("agg", layout.agg_workers) if layout.agg_workers else ("decode", layout.decode_workers)
    return math.ceil(2 * _MAX_DELAY * rate * workers[role].loaded_seconds(shape, rate / count))


@dataclass(slots=True, eq=False)
class _Part:
    """A common part of prompts: its running users, the tokens they use, and the tokens with KV."""

    users: int = 0
    in_use: int = 0
    known: int = 0


class Blocks:
    """KV in tokens, by parts of prompts. Running requests share a common part; unused parts stay cached, and the least
    recently used is evicted first. An answer extends the last part of its prompt.
    """

    def __init__(self, limit: float, size: int) -> None:
        """`limit`: tokens of the pool. `size`: tokens of a block."""
        self._limit, self._size = limit, size
        self.used = self._num_idle = 0
        self._parts: dict[Hashable, _Part] = {}
        #: Unused parts, the oldest first.
        self._idle: dict[Hashable, _Part] = {}

    def cached(self, ask: Ask) -> int:
        """Cached tokens at the start of the prompt, in full blocks. The last token is always computed."""
        count = 0
        for name, tokens in ask.parts:
            known = part.known if (part := self._parts.get(name)) is not None else 0
            count += min(known, tokens)
            if known < tokens:
                break
        return min(count, ask.prompt_tokens - 1) // self._size * self._size

    def whole(self, tokens: int) -> int:
        """The tokens rounded up to full blocks."""
        return -(-tokens // self._size) * self._size

    def wanted(self, ask: Ask) -> int:
        """Prompt tokens that no running request uses."""
        wanted = ask.prompt_tokens
        for name, tokens in ask.parts:
            if (part := self._parts.get(name)) is not None:
                wanted -= min(tokens, part.in_use)
        return wanted

    def fits(self, ask: Ask, answer: int) -> bool:
        return self.used + self.wanted(ask) + answer <= self._limit

    def reserve(self, ask: Ask, answer: int = 0) -> int:
        """Reserves the prompt and `answer` tokens. Returns the number for `release`."""
        reserved = self.wanted(ask) + answer
        for name, tokens in ask.parts:
            part = self._parts.setdefault(name, _Part())
            if self._idle.pop(name, None) is not None:
                self._num_idle -= part.known
            part.users, part.in_use = part.users + 1, max(part.in_use, tokens)
        self._use(reserved)
        return reserved

    def store(self, ask: Ask, answer: int = 0) -> None:
        """Caches the KV of the prompt and of `answer` tokens."""
        for name, tokens in ask.parts:
            part = self._parts[name]
            part.known = max(part.known, tokens)
        if ask.parts:
            part.known = max(part.known, tokens + answer)

    def release(self, ask: Ask, reserved: int) -> None:
        for name, _ in reversed(ask.parts):  # evict the end of a prefix before its start
            part = self._parts[name]
            part.users -= 1
            if not part.users:
                part.in_use, self._idle[name] = 0, part
                self._num_idle += part.known
        self._use(-reserved)

    def _use(self, tokens: int) -> None:
        self.used += tokens
        while self._num_idle + self.used > self._limit and self._idle:
            name, part = next(iter(self._idle.items()))
            gone = min(part.known, self._num_idle + self.used - int(self._limit))
            self._num_idle, part.known = self._num_idle - gone, part.known - gone
            if not part.known:
                del self._idle[name], self._parts[name]


@dataclass(frozen=True, slots=True)
class SimulatedPoint:
    """The simulated requests of one point, in order of arrival (seconds)."""

    arrivals: Sequence[float]
    times: Mapping[Quantity, Sequence[float]]
    #: Per request, on average: computed prompt tokens, and tokens of moved KV.
    computed: float = 0.0
    moved: float = 0.0
    #: Share of the requests that one worker answered.
    by_one_worker: float = 0.0
    #: False: stopped, because too many requests were late.
    is_whole: bool = True

    def goodput_share(self, slo: Slo) -> float:
        """The share of the rate that was answered in time."""
        if not self.is_whole:
            return 0.0
        limits = [(self.times[name], limit / 1000) for name, limit in slo.limits.items()]
        count = len(self.arrivals)
        in_time = sum(all(own[i] <= limit for own, limit in limits) for i in range(count)) / count
        return min(in_time, done_share(self.arrivals, self.times["latency"]))


def knee(first_guess: float, share_at: Callable[[float], float]) -> float:
    """The highest rate, to 5 %, with nearly all answers in time. Searches from `first_guess` in growing steps, at most
    _FARTHEST doublings away. `share_at`: `SimulatedPoint.goodput_share` at a rate.
    """

    def is_kept(doublings: float) -> bool:
        return share_at(first_guess * 2**doublings) >= ENOUGH_IN_TIME

    step = 4 / PRECISE if is_kept(0.0) else -4 / PRECISE
    here, there = 0.0, step
    while abs(here) < _FARTHEST and is_kept(there) is (step > 0):
        step *= 2
        here, there = there, max(-_FARTHEST, min(_FARTHEST, there + step))
    low, high = min(here, there), max(here, there)
    while (high - low) * PRECISE > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return first_guess * float(2**low)
