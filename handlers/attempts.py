"""How a request is answered, as data: the attempts, in order. The first is what the request, the deployment or a
decider chose; the others are for when it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trtllm_disagg.config.thresholds import Live
from trtllm_disagg.errors import InvalidRequestError, NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.decide import Decider
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.select import NEXT
from trtllm_disagg.types import Fallback, Generate, GenerateRequest
from trtllm_disagg.wire.bodies import require_splittable

#: Counts a request until the result is called; may raise OverloadedError instead.
Enter = Callable[[GenerateRequest], Callable[[], None]]


class Attempt(NamedTuple):
    """One try at a whole request, or the one try at a phase."""

    #: A `Fallback`: its name in logs, metrics and answers.
    to: str
    chunks: Generate
    #: The strategy that it runs; None: the chosen one.
    strategy: str | None = None
    #: It does not use this worker's engine, and is only for requests that have lost that engine.
    without_engine: bool = False
    #: Counts the request while the attempt runs; with `until_first` until it has a token.
    enter: Enter | None = None
    until_first: bool = False


class Plan(Protocol):
    async def attempts(self, request: GenerateRequest) -> Sequence[Attempt]:
        """The attempts in their order; the choice is recorded in the request trace. Raises InvalidRequestError for a
        request that this worker cannot serve, PeerUnavailableError for one that another worker should not have sent.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneStrategy:
    """The same for every request: no worker calls another, but for drains, so there is nothing to choose."""

    name: str
    attempt: Attempt
    #: The request's phases run on two workers.
    is_split: bool

    async def attempts(self, request: GenerateRequest) -> Sequence[Attempt]:
        if self.is_split:
            require_splittable(request, gets_prompt_logprobs=False)
        request.trace.chose(self.name, "default")
        return (self.attempt,)


#: `nvext.annotations: ["disagg:decode_first"]`.
PREFIX = "disagg:"

LOCAL, AUTO = "local", "auto"


@dataclass(frozen=True, slots=True)
class Routes:
    """The attempts of each strategy, and of `local`: this worker does both phases."""

    by_name: Mapping[str, Sequence[Attempt]]
    #: The order with this worker's role as first stage, and the one for which a worker of the other role is asked.
    own: str
    relayed: str
    #: As `relayed`, because this worker's batch is full.
    busy: Sequence[Attempt]
    #: In place of the other stage; None: no worker may do that (`--on-missing-stage`).
    alone: Attempt | None


@dataclass(frozen=True, slots=True)
class WorkerSidePlan:
    """Chooses the order of each request, on a worker that calls, or is called by, workers of the other role."""

    role: str
    #: What workers of the other role may ask for, by `PhaseRequest.kind`.
    phases: Mapping[str, Attempt]
    routes: Routes
    decide: Decider
    #: For the strategy `auto`.
    decide_auto: Decider
    strategy: Live[str]
    peers: Peers
    facts: PairFacts
    #: One more answer fits into the batch of this worker's engine.
    has_room: Callable[[], bool]
    gets_prompt_logprobs: bool

    async def attempts(self, request: GenerateRequest) -> Sequence[Attempt]:
        require_splittable(request, gets_prompt_logprobs=self.gets_prompt_logprobs)
        asked = request.phase_request
        if asked is not None and asked.kind != "whole":
            if asked.kind not in self.phases:
                raise PeerUnavailableError(f"a {self.role} worker was asked for the phase {asked.kind}")
            return (self.phases[asked.kind],)
        self.peers.check(request)
        await self.peers.learn()
        alone = self.facts.why_not_alone(request)
        attempts = self._chosen(request, alone)
        if alone is None:
            return attempts
        return [each for each in attempts if each.to != Fallback.LOCAL]

    def _chosen(self, request: GenerateRequest, alone: str | None) -> Sequence[Attempt]:
        """`alone`: why this worker cannot answer it alone; None when it can."""
        asked, trace = request.phase_request, request.trace
        if asked is not None and asked.strategy is not None:
            name, reason = asked.strategy, "asked_by_worker"
            if name not in self._names:  # of another version
                raise PeerUnavailableError(f"this worker does not know the strategy {name!r}")
        elif (named := self._annotated(request)) is not None:
            name, reason = named, "annotation"
        else:
            name, reason = self.strategy.value, "default"
        if name == AUTO:
            return self._auto(request, alone)
        if reason == "default":
            with request.span.child("decide"):
                decision = self.decide(request)
            name, reason = name if decision.both_stages else LOCAL, decision.reason
        trace.chose(*self._possible(request, name, reason, alone))
        return self.routes.by_name[trace.strategy]

    def _possible(
        self, request: GenerateRequest, name: str, reason: str, alone: str | None
    ) -> tuple[str, str]:
        """The choice, or the other one where an engine cannot take the request. Raises InvalidRequestError where no
        choice is left.
        """
        if name not in (LOCAL, self.routes.own) or (name == LOCAL and alone is None):
            return name, reason
        in_a_pair = self.facts.why_not_in_a_pair(request)
        if name == LOCAL and in_a_pair is None:
            if reason == "annotation":
                request.trace.fell_back(Fallback.OTHER_INSTANCE, f"not by this worker alone: {alone}")
            return self.routes.own, "not_alone"
        if name != LOCAL and in_a_pair is not None and alone is None:
            return LOCAL, "not_in_a_pair"
        if (why := alone if name == LOCAL else in_a_pair) is not None:
            raise InvalidRequestError(why)
        return name, reason

    def _auto(self, request: GenerateRequest, alone: str | None) -> Sequence[Attempt]:
        """The order of each request, by length, queues and health of the other stage.

        local: little to compute, a queue in front of the other stage, or no healthy instance there; then with the
        limits of a fallback, `--on-missing-stage` and `--max-local-fallbacks`. Otherwise the order that has this worker
        as first stage; the other order when this worker's engine decodes as much as fits into its batch, so that
        another decode worker can be found.
        """
        routes, trace = self.routes, request.trace
        with request.span.child("decide"):
            decision = self.decide_auto(request)
        name, reason = self._possible(
            request, routes.own if decision.both_stages else LOCAL, decision.reason, alone
        )
        if name != LOCAL and self.peers.num_healthy() == 0:
            reason = "no_peer"
            if routes.alone is not None and alone is None:
                trace.chose(LOCAL, f"{AUTO}_{reason}")
                # Counted as in the other orders: an alert is about it.
                trace.fell_back(Fallback.LOCAL, NoInstanceError("no instance of the other stage is healthy"))
                return (routes.alone,)
        elif name != LOCAL and not self.has_room():
            trace.chose(routes.relayed, f"{AUTO}_busy")
            return routes.busy
        trace.chose(name, f"{AUTO}_{reason}")
        return routes.by_name[name]

    @property
    def _names(self) -> Collection[str]:
        return {*self.routes.by_name, AUTO}

    def _annotated(self, request: GenerateRequest) -> str | None:
        """The strategy that the request's annotations name. Raises InvalidRequestError when they name two."""
        words = [a for a in request.annotations if a.startswith(PREFIX) and not a.startswith(NEXT)]
        names = [self._known(word.removeprefix(PREFIX)) for word in dict.fromkeys(words)]
        if len(names) > 1:
            both = " and ".join(PREFIX + name for name in names)
            raise InvalidRequestError(
                f"nvext.annotations: {both} contradict each other; expected one of them"
            )
        return names[0] if names else None

    def _known(self, name: str) -> str:
        if name not in self._names:
            allowed = ", ".join([*(PREFIX + each for each in sorted(self._names)), NEXT + "INSTANCE,..."])
            raise InvalidRequestError(
                f"nvext.annotations: {PREFIX + name!r} is not allowed; expected one of {allowed}"
            )
        return name
