"""Plans how a request is answered: a list of attempts. The request, the deployment or a decider chooses the first; the
others run in turn after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from trtllm_disagg.config.deciders import ALWAYS, DECIDERS, Decision, Facts, agreed, auto_rules
from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import InvalidRequestError, NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.admission import RequestCount, max_total_tokens
from trtllm_disagg.handlers.cached_prefix import CachedPrefixes
from trtllm_disagg.handlers.live_state import OtherOccupancy, OwnOccupancy
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.selection import NEXT
from trtllm_disagg.types import Fallback, Generate, GenerateRequest
from trtllm_disagg.wire.bodies import require_splittable

#: Counts a request until the result is called; may raise OverloadedError.
Enter = Callable[[GenerateRequest], Callable[[], None]]


#: The name of the first attempt.
FIRST = "first"


class Attempt(NamedTuple):
    """One try at a client's request, or the only try at a phase."""

    #: `FIRST` or the fallback step, as logs, metrics and answers name it.
    name: str
    #: Chain, Concurrent, LocalAgg or RemoteAnswer; for a phase: PrefillService, LocalDecode or LocalPush.
    chunks: Generate
    #: The strategy it runs; None: the chosen one.
    strategy: str | None = None
    #: Runs on a peer; used only after this worker's engine died.
    without_engine: bool = False
    #: Counts the request while the attempt runs; with `until_first`, only until its first token.
    enter: Enter | None = None
    until_first: bool = False


class Plan(Protocol):
    async def attempts(self, request: GenerateRequest) -> Sequence[Attempt]:
        """The attempts in order; records the choice in the request trace. Raises InvalidRequestError for a request that
        this worker cannot serve, PeerUnavailableError for one that a peer should not have sent.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneStrategy:
    """One attempt for every request: workers call each other only for drains, so there is no choice."""

    name: str
    attempt: Attempt
    #: The request's phases run on two workers.
    is_split: bool

    async def attempts(self, request: GenerateRequest) -> Sequence[Attempt]:
        if self.is_split:
            require_splittable(request, gets_prompt_logprobs=False)
        request.trace.chose(self.name, "default")
        return (self.attempt,)


#: Decides whether a request also goes to a peer.
Decider = Callable[[GenerateRequest], Decision]


@dataclass(frozen=True, slots=True)
class FactSources:
    """Collects a decision's facts: of this worker, its peers, and the requests that it answers alone."""

    role: Role
    cached: CachedPrefixes
    #: The number of requests that wait for a peer, without those that peers run. Never waits.
    depth: Callable[[], int]
    own: OwnOccupancy = field(default_factory=OwnOccupancy)
    other: OtherOccupancy = lambda: None
    kept: RequestCount = field(default_factory=RequestCount)

    def facts(self, request: GenerateRequest) -> Facts:
        num_prompt = request.num_prompt
        num_cached = self.cached.num_cached(request.token_ids, request.cache_salt, request.dp_rank)
        return Facts(
            num_prompt,
            num_prompt - num_cached,
            self.depth(),
            is_prefill_worker=self.role is Role.PREFILL,
            max_total_tokens=max_total_tokens(request),
            num_kept=self.kept.requests,
            kept_tokens=self.kept.tokens,
            own_occupancy=self.own.share,
            other_occupancy=self.other(),
        )


def create_decider(name: str, sources: FactSources, thresholds: Live[Thresholds]) -> Decider:
    """The rule `name` of `DECIDERS`. It adds the facts of each decision to the request trace."""
    if name == ALWAYS:  # needs no facts
        return lambda request: Decision(True, ALWAYS)

    def decide(request: GenerateRequest) -> Decision:
        if not request.has_known_length:  # it may be long
            return Decision(True, "image")
        facts = sources.facts(request)
        request.trace.facts |= facts.as_json()
        return thresholds.value.rule(DECIDERS[name]).decide(facts)

    return decide


def create_auto_decider(name: str, sources: FactSources, thresholds: Live[Thresholds]) -> Decider:
    deciders = [create_decider(each, sources, thresholds) for each in auto_rules(name)]
    return lambda request: agreed(*(decide(request) for decide in deciders))


#: `nvext.annotations: ["disagg:decode_first"]`.
PREFIX = "disagg:"

LOCAL, AUTO = "local", "auto"


@dataclass(frozen=True, slots=True)
class Routes:
    """The attempts of each strategy, and of `local`: this worker does both phases."""

    by_name: Mapping[str, Sequence[Attempt]]
    #: The order that starts with this worker's role, and the one that starts with a peer.
    own: str
    relayed: str
    #: The peer's order, used because this worker's batch is full.
    busy: Sequence[Attempt]
    #: When the other stage is missing; None: refuse (`--on-missing-stage`).
    alone: Attempt | None


@dataclass(frozen=True, slots=True)
class ChainingPlan:
    """Chooses each request's order, on a worker that has peers."""

    role: str
    #: What peers may ask for, by `PhaseRequest.phase`.
    phases: Mapping[str, Attempt]
    routes: Routes
    decide: Decider
    #: For the strategy `auto`.
    decide_auto: Decider
    strategy: Live[str]
    peers: Peers
    facts: PairFacts
    #: This engine's batch has room for one more answer.
    has_room: Callable[[], bool]
    gets_prompt_logprobs: bool

    async def attempts(self, request: GenerateRequest) -> Sequence[Attempt]:
        require_splittable(request, gets_prompt_logprobs=self.gets_prompt_logprobs)
        asked = request.phase_request
        if asked is not None and asked.phase != "whole":
            if asked.phase not in self.phases:
                raise PeerUnavailableError(f"a {self.role} worker was asked for the phase {asked.phase}")
            return (self.phases[asked.phase],)
        self.peers.check(request)
        await self.peers.learn()
        alone = self.facts.why_not_alone(request)
        attempts = self._chosen(request, alone)
        if alone is None:
            return attempts
        return [each for each in attempts if each.strategy != LOCAL]

    def _chosen(self, request: GenerateRequest, alone: str | None) -> Sequence[Attempt]:
        """`alone`: why this worker cannot answer alone; None: it can."""
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
        """The choice, or the alternative if an engine cannot run it. Raises InvalidRequestError when neither can."""
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

        local: the prompt is short, the other stage has a queue, or it has no healthy instance (then within
        `--on-missing-stage` and `--max-local-fallbacks`). Otherwise this worker is the first stage; if its batch is
        full, a peer is, which can find another decode worker.
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
                # Counted as in the other orders: an alert watches it.
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
        """The strategy named by the request's annotations. Raises InvalidRequestError for two."""
        if not request.annotations:
            return None
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
