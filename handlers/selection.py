"""Selects a request's instance of the other role: by its pins, or by `--next-router`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Any, Protocol

from trtllm_disagg.errors import InvalidRequestError, NoInstanceError
from trtllm_disagg.types import Fallback, GenerateRequest, RequestContext

log = logging.getLogger(__name__)

#: The number of instances remembered, former ones too: a pin to one is valid, though it cannot be met.
_REMEMBERED = 4096

_KV_ROUTER_SECONDS = 1.0
#: Pause before asking a silent router again.
_KV_ROUTER_PAUSE_SECONDS = 5.0

# Dynamo's frontend treats our first stage as aggregated workers. It answers 400 unless `decode_worker_id` (or the
# header x-dynamo-worker-instance-id) is an instance of that stage, and forwards `prefill_worker_id`
# (x-dynamo-prefill-instance-id) unchecked. Both may name either role; measured in both orders (docs/log/dynamo.md).

#: `nvext.annotations: ["disagg:next=1a2b,3c4d"]`: ids hexadecimal, as in logs, or decimal, as in Dynamo's requests.
NEXT = "disagg:next="

_ID = re.compile(r"[0-9a-f]{1,16}|[0-9]{1,20}")


def pins_of(request: GenerateRequest, own_id: int, known: Collection[int]) -> list[int]:
    """The annotation's ids, else Dynamo's pins except this worker. An ambiguous number, hexadecimal or decimal, is read
    as the id in `known`. Raises InvalidRequestError for other texts.
    """
    words = [w for a in request.annotations if a.startswith(NEXT) for w in a.removeprefix(NEXT).split(",")]
    if words:
        return [_read(word.strip().lower(), known) for word in words]
    return [pin for pin in request.pins.values() if pin not in (None, own_id)]


def names_prefill(request: GenerateRequest) -> bool:
    """Whether the request pins prefill workers; asked on a decode worker."""
    return request.pins.get("prefill") is not None or any(a.startswith(NEXT) for a in request.annotations)


def _read(word: str, known: Collection[int]) -> int:
    if not _ID.fullmatch(word):
        raise InvalidRequestError(
            f"nvext.annotations: {NEXT + word!r} is not allowed; expected ids of instances, hexadecimal or decimal, "
            "with commas"
        )
    readings = [int(word, base) for base in (16, 10) if base == 16 or word.isdecimal()]
    return next((each for each in readings if each in known), readings[0])


class Directory(Protocol):
    """The instances of the other role in discovery."""

    def instance_ids(self) -> Collection[int]:
        """The ids in discovery now."""
        ...

    def instance(self, instance_id: int) -> StageInstance:
        """One of them."""
        ...


class StageClient(Directory, Protocol):
    """The workers of the other role, and the rule that selects one."""

    async def pick(self, request: GenerateRequest) -> StageInstance:
        """An instance outside `request.avoid`; one of `request.skipped` only if there is no other. Raises
        NoInstanceError.
        """
        ...

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidRequestError if the request pins an instance that never existed."""
        ...


class StageInstance(Protocol):
    """One worker of the other role."""

    @property
    def instance_id(self) -> int: ...

    async def describe(self) -> dict[str, Any]:
        """The worker's description (`pairing.describe_worker`). Raises a DisaggError."""
        ...

    def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Call the worker with the request id, metadata and trace of `context`, and yield its chunks. If the context
        stops, the call stops and the chunks end; None: no client waits. Raises a DisaggError with this instance as
        `peer`.
        """
        ...

    async def notify(self, notice: dict[str, Any]) -> None:
        """Send a request without an answer (`PhaseRequest.is_notice`). Load and circuit breaker ignore it. Raises a
        DisaggError.
        """
        ...


class NoStage:
    """The StageClient of a worker that calls no other."""

    async def pick(self, request: GenerateRequest) -> StageInstance:
        raise AssertionError("this worker has no second stage")

    def instance_ids(self) -> Collection[int]:
        return ()

    def instance(self, instance_id: int) -> StageInstance:
        raise AssertionError("this worker has no second stage")

    def check(self, request: GenerateRequest) -> None:
        """Accept every request: a pin has no effect here."""


class Selector(Protocol):
    """The rule that picks one of several instances."""

    async def choose(self, request: GenerateRequest, candidates: Sequence[int]) -> int:
        """One of `candidates`, which is never empty."""
        ...


class Weights:
    """How much each instance does at once, relative to others. An unknown weight counts as the known ones' median."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._median = 1
        self.are_equal = True

    def set(self, instance_id: int, weight: int | None) -> None:
        """`weight`: None: unknown. Another program's description may have an invalid one."""
        if self._known.get(instance_id) == weight:
            return
        self._known.pop(instance_id, None)
        if weight is not None and weight > 0:
            self._known[instance_id] = weight
        self.are_equal = len(set(self._known.values())) <= 1
        self._median = median_low(self._known.values()) if self._known else 1

    def of(self, instances: Iterable[int]) -> list[int]:
        return [self._known.get(each, self._median) for each in instances]


class InFlight:
    """This worker's load on each instance: the prompt tokens of its running calls."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        #: Of the same instances.
        self.weights = Weights()

    def __getitem__(self, instance_id: int) -> int:
        return self._tokens.get(instance_id, 0)

    def of(self, instances: Iterable[int]) -> dict[int, int]:
        """The load of each."""
        return {each: self._tokens.get(each, 0) for each in instances}

    def enter(self, instance_id: int, tokens: int) -> Callable[[], None]:
        self.add(instance_id, tokens)
        return partial(self.add, instance_id, -tokens)

    def add(self, instance_id: int, tokens: int) -> None:
        total = self[instance_id] + tokens
        if total:
            self._tokens[instance_id] = total
        else:
            self._tokens.pop(instance_id, None)


class RoundRobin:
    """Chooses the instance picked longest ago. A request counter would be biased: if every other request has a single
    candidate, by a pin or a cached prompt, all requests between would go to one instance.

    An instance is due again after a time inverse to its weight. Being late or early, by at most one round, counts for
    its next pick: so the shares are exact, and no instance catches up on more.
    """

    def __init__(self, weights: Weights | None = None) -> None:
        self._counter = itertools.count()
        #: Instance -> number of its last pick, oldest first.
        self._last_picks: dict[int, float] = {}
        self._weights = weights or Weights()

    async def choose(self, request: GenerateRequest, candidates: Sequence[int]) -> int:
        return self.cheapest(await self._costs(request, candidates))

    def cheapest(self, costs: Mapping[int, float]) -> int:
        """Only the cheapest are candidates."""
        least = min(costs.values())
        cheapest = [each for each, cost in costs.items() if cost == least]
        pick: float = next(self._counter)
        last = self._last_picks
        # Calls no Python function per instance: there may be a thousand.
        if not_picked := [each for each in cheapest if each not in last]:
            chosen = min(not_picked)
        elif self._weights.are_equal:
            chosen = min(cheapest, key=last.__getitem__)
        else:
            weights = self._weights.of(cheapest)
            total, each_round = sum(weights), len(weights)
            due, chosen = min(
                [(last[each] + total / weight, each) for each, weight in zip(cheapest, weights, strict=True)]
            )
            pick -= max(-each_round, min(each_round, pick - due))
        last.pop(chosen, None)
        last[chosen] = pick
        if len(last) > _REMEMBERED:
            del last[next(iter(last))]
        return chosen

    async def _costs(self, request: GenerateRequest, candidates: Sequence[int]) -> Mapping[int, float]:
        return dict.fromkeys(candidates, 0)


class Random:
    def __init__(self, weights: Weights | None = None, numbers: random.Random | None = None) -> None:
        self._weights = weights or Weights()
        self._numbers = numbers or random.Random()

    async def choose(self, request: GenerateRequest, candidates: Sequence[int]) -> int:
        if self._weights.are_equal:
            return self._numbers.choice(candidates)
        return self._numbers.choices(candidates, self._weights.of(candidates))[0]


class LeastLoaded(RoundRobin):
    """Chooses the instance with the fewest of this worker's prompt tokens in flight per weight; equals take turns."""

    def __init__(self, in_flight: InFlight) -> None:
        super().__init__(in_flight.weights)
        self._in_flight = in_flight

    async def _costs(self, request: GenerateRequest, candidates: Sequence[int]) -> Mapping[int, float]:
        return self.work(dict.fromkeys(candidates, 0))

    def work(self, cached: Mapping[int, int]) -> Mapping[int, float]:
        """Each instance's tokens in flight, scaled to the mean weight, minus this prompt's `cached` tokens."""
        in_flight: Mapping[int, float] = self._in_flight.of(cached)
        if not self._weights.are_equal:
            weights = self._weights.of(cached)
            mean = sum(weights) / len(weights)
            load = zip(in_flight.items(), weights, strict=True)
            in_flight = {each: tokens * mean / weight for (each, tokens), weight in load}
        return {each: in_flight[each] - tokens for each, tokens in cached.items()}


#: Returns the number of the prompt's tokens in each instance's cache. May fail.
Overlaps = Callable[[GenerateRequest], Awaitable[Mapping[int, int]]]


class BestCached(LeastLoaded):
    """Chooses the instance with the least work: the uncached part of this prompt, plus the prompt tokens in flight."""

    def __init__(
        self,
        overlaps: Overlaps,
        in_flight: InFlight,
        seconds: float = _KV_ROUTER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds`: limit for the KV router, which usually needs a thousandth of it."""
        super().__init__(in_flight)
        self._overlaps = overlaps
        self._seconds = seconds
        self._clock = clock
        self._is_failing = False
        #: A router that hangs would cost each request `seconds`.
        self._asked_again_at = 0.0

    async def _costs(self, request: GenerateRequest, candidates: Sequence[int]) -> Mapping[int, float]:
        cached = await self._cached(request)
        return self.work({each: cached.get(each, 0) for each in candidates})

    async def _cached(self, request: GenerateRequest) -> Mapping[int, int]:
        """Empty if the KV router fails, which must not fail the request."""
        if self._clock() < self._asked_again_at:
            return {}
        try:
            async with asyncio.timeout(self._seconds):
                cached = await self._overlaps(request)
        except Exception as error:
            if not self._is_failing:
                log.warning("the KV router does not answer, so load alone decides: %r", error)
            self._is_failing = True
            if isinstance(error, TimeoutError):
                self._asked_again_at = self._clock() + _KV_ROUTER_PAUSE_SECONDS
            return {}
        self._is_failing = False
        return cached


#: Value of `--next-router` -> how its selector is made.
SELECTORS: dict[str, Callable[[InFlight, Overlaps], Selector]] = {
    "round_robin": lambda in_flight, overlaps: RoundRobin(in_flight.weights),
    "random": lambda in_flight, overlaps: Random(in_flight.weights),
    "least_loaded": lambda in_flight, overlaps: LeastLoaded(in_flight),
    "kv": lambda in_flight, overlaps: BestCached(overlaps, in_flight),
}


class Selection:
    """A StageClient: obeys pins, then the selector, among the instances that have not failed this request."""

    def __init__(self, directory: Directory, selector: Selector, role: str, own_id: int = 0) -> None:
        """`role`: the other role, prefill or decode. `own_id`: this worker's instance id."""
        self._own_id = own_id
        self._directory = directory
        self._selector = selector
        self._role = role
        #: Present and former instances, in the order last seen.
        self._known: dict[int, None] = {}
        self._there: Collection[int] = ()

    def instance_ids(self) -> Collection[int]:
        """Called several times a request, so an unchanged list costs one comparison."""
        ids = self._directory.instance_ids()
        if ids == self._there:
            return ids
        self._there = list(ids)
        for each in ids:
            self._known.pop(each, None)
            self._known[each] = None
        for each in list(self._known)[: max(0, len(self._known) - _REMEMBERED)]:
            del self._known[each]
        return ids

    async def pick(self, request: GenerateRequest) -> StageInstance:
        there = self.instance_ids()
        possible = [each for each in there if each not in request.avoid]
        allowed = [each for each in possible if each not in request.skipped] or possible
        if not there:
            raise NoInstanceError(f"no {self._role} worker is in discovery")
        if not allowed:
            raise NoInstanceError(
                f"none of {len(there)} {self._role} instances can take this request: they failed it or do not fit this "
                "worker"
            )
        chosen = await self._selector.choose(request, self._pinned(request, allowed) or allowed)
        return self.instance(chosen)

    def instance(self, instance_id: int) -> StageInstance:
        return self._directory.instance(instance_id)

    def check(self, request: GenerateRequest) -> None:
        if request.phase_request is not None or request.is_further_choice:
            return  # checked by its sender, or with the first choice
        there = self.instance_ids()
        unknown = [pin for pin in self._pins(request) if pin not in self._known]
        if unknown:
            names = ", ".join(f"{each:x}" for each in sorted(there)) or "none, no instance is there"
            raise InvalidRequestError(
                f"pinned {self._role} instance {unknown[0]:x} is not known; expected one of {names}"
            )

    def _pins(self, request: GenerateRequest) -> list[int]:
        return pins_of(request, self._own_id, self._known)

    def _pinned(self, request: GenerateRequest, allowed: Sequence[int]) -> list[int]:
        """The allowed pins. If there are pins but none is allowed, the request trace gets the reason once."""
        pins = [pin for pin in self._pins(request) if pin in self._known]
        allowed_pins = [pin for pin in pins if pin in allowed]
        if pins and not allowed_pins:
            names = ", ".join(f"{pin:x}" for pin in pins)
            why = "is gone" if not set(pins) & (request.avoid | request.skipped) else "failed or is skipped"
            because = f"pinned {self._role} instance {names} {why}"
            if not any(because in recorded for recorded in request.trace.fallbacks):
                request.trace.fell_back(Fallback.OTHER_INSTANCE, because)
        return allowed_pins
