"""Decides what the workers do next: `reconcile` compares the wish with what a look has seen.

Pure: no process, clock or history. `up` and fleet commands call it after each look and take its steps, so interrupted
commands, late workers of an old revision or role, and deaths need no special case. On the way to the wish
- a first stage stops, flips or becomes a second stage only while another of its revision answers, unless the wish has
  none, or the operator forces it;
- old workers stop only while the new revision answers, the first stage before the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import require_switchable, spec_of, switchable
from trtllm_disagg.tools.up.commands import Description


class Phase(StrEnum):
    """A worker's phase, as far as the next step depends on it."""

    STARTING = "starting"
    SERVING = "serving"
    #: Finishes its requests, to end or to flip.
    LEAVING = "leaving"
    #: Died, and starts again after a delay.
    WAITING = "waiting for its next start"
    #: Died too often. Keeps its place until the wish changes.
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker at one look."""

    name: str
    role: str
    phase: Phase
    strategy: str = ""
    revision: str = ""
    #: Role that it flips to.
    becomes: str = ""
    #: Frontends know it and may send requests.
    is_registered: bool = False
    #: The frontend sends it requests; in a new revision, it has answered one.
    answers: bool = False
    #: Running requests from frontends.
    requests: int = 0
    #: Why it cannot serve: it died before it was ready, or does not answer the frontend.
    fault: str = ""
    #: A command to it is in progress.
    is_busy: bool = False
    #: Thresholds that it still needs.
    lacks: Mapping[str, Any] = field(default_factory=dict)
    #: Its description and id; None in a version without one.
    instance: str = ""
    description: Description | None = None

    @property
    def label(self) -> str:
        return f"{self.role} {self.instance or self.name}"

    @property
    def takes_requests(self) -> bool:
        return self.is_registered and takes_requests(self.role, self.strategy)

    @property
    def is_first(self) -> bool:
        """It is a first stage, answers, and will: a worker with a command in progress may have removed its card."""
        return self.phase is Phase.SERVING and self.takes_requests and self.answers and not self.is_busy

    @property
    def lasts(self) -> bool:
        """It stays, unless a step stops it."""
        return self.phase is not Phase.LEAVING or bool(self.becomes)


def takes_requests(role: str, strategy: str) -> bool:
    """Whether clients get answers from this role; under `router`, the frontend calls both."""
    return role == Role.AGG or (bool(strategy) and role == (spec_of(strategy).entry_role or Role.DECODE))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wish. Only commands, `Adopt` and `Withdraw` replace it."""

    strategy: str
    #: Current revision.
    revision: str = ""
    #: Role -> number of workers; empty: another program starts and stops them.
    workers: Mapping[str, int] = field(default_factory=dict)
    #: Worker -> role, for flipped workers.
    roles: Mapping[str, str] = field(default_factory=dict)
    #: Workers that flip even as the last of their role.
    forced: frozenset[str] = frozenset()
    #: Revision that replaces the current one as soon as it answers.
    following: str | None = None
    #: Its workers come one by one, each in the place (GPUs) of a stopped one.
    in_place: bool = False
    #: Drain of replaced workers; None: their own.
    drain_seconds: float | None = None
    #: Thresholds set since the start.
    thresholds: Mapping[str, Any] = field(default_factory=dict)

    def role_of(self, worker: Seen) -> str:
        return self.roles.get(worker.name) or worker.becomes or worker.role

    @property
    def revisions(self) -> tuple[str, ...]:
        return (self.revision,) if self.following is None else (self.revision, self.following)


def reverted(now: Wanted, before: Wanted, after: Wanted) -> Wanted:
    """`now` without the change from `before` to `after`; later changes stay."""
    single = {
        each.name: getattr(before, each.name)
        for each in fields(Wanted)
        if each.name not in ("workers", "roles", "revision")
        and getattr(before, each.name) != getattr(after, each.name) == getattr(now, each.name)
    }
    workers = {
        role: count + before.workers.get(role, 0) - after.workers.get(role, 0)
        for role, count in now.workers.items()
    }
    flipped = {name for name, role in after.roles.items() if before.roles.get(name) != role}
    roles = {name: role for name, role in now.roles.items() if name not in flipped}
    roles |= {name: before.roles[name] for name in flipped & before.roles.keys()}
    return replace(now, **single, workers=workers, roles=roles)


@dataclass(frozen=True, slots=True)
class Start:
    role: str
    revision: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker finishes its requests within `drain_seconds` (None: its own limit), and ends."""

    name: str
    drain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Flip:
    name: str
    to: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class Switch:
    name: str
    to: str


@dataclass(frozen=True, slots=True)
class Set:
    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Adopt:
    """The new revision becomes the current one."""

    revision: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The new revision is given up; the current one stays."""

    revision: str
    why: str


#: Steps of a worker that is there.
WorkerStep = Stop | Flip | Switch | Set
Step = Start | WorkerStep | Adopt | Withdraw


def reconcile(wanted: Wanted, seen: Sequence[Seen]) -> list[Step]:
    """All steps that can be taken now; empty: wait for the next look. The caller must see started and stopped workers
    as STARTING and LEAVING, and workers with a command in progress as busy.
    """
    view = _View(wanted, seen)
    if change := view.revision_changes():
        return [change]
    steps = list[Step]()
    for step in view.steps():
        steps.append(step)
        if isinstance(step, WorkerStep):
            assert step.name not in view.moving, "one step per worker"
            view.moving.add(step.name)
    return steps


def check_switch(to: str, now: str, seen: Iterable[Seen]) -> None:
    """Raises ConfigError, with the alternatives, if workers under `now` cannot run `to`."""
    require_switchable(to)
    workers = [each.description for each in seen if each.description is not None]
    roles = Counter(each.role for each in workers)
    there = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
    if now not in switchable() or roles[Role.AGG]:
        allowed = f"no switch of a deployment of {there} under {now}: its frontend treats them differently"
        raise ConfigError.bad_value("--to", to, f"{allowed}; start another deployment")
    if missing := [role for role in (Role.PREFILL, Role.DECODE) if not roles[role] and workers]:
        raise ConfigError(
            f"--to {to} needs both roles, but there is no {' and no '.join(missing)} worker (there are: {there}); "
            "switch when one is ready at the usual endpoint of the namespace, not at one of its own by --endpoint or "
            "--next-endpoint"
        )
    for each in workers:
        if each.fixed_by:
            allowed = f"no switch: {each.process or each.role} was started with {' and '.join(each.fixed_by)}"
            usual = "only workers at the usual endpoints can be switched"
            raise ConfigError.bad_value("--to", to, f"{allowed}; {usual}")
    models = sorted({each.model for each in workers})
    if len(models) > 1:
        allowed = "the namespace of one model; there are several in this one"
        raise ConfigError.bad_value("--namespace", ", ".join(models), allowed)


class _View:
    """One look at the workers, and the wish."""

    def __init__(self, wanted: Wanted, seen: Sequence[Seen]) -> None:
        self._wanted = wanted
        self._seen = seen
        #: Workers with a step in this round, which the rules after it skip.
        self.moving: set[str] = set()

    def steps(self) -> Iterator[Step]:
        """Each step must be in `moving` before the next one is asked for."""
        yield from self.settings()
        yield from self.flips()
        for revision in self._wanted.revisions:
            yield from self.switches(revision)
        yield from self.numbers()
        yield from self.following()
        yield from self.old_revisions()

    def of(self, revision: str, role: str | None = None) -> list[Seen]:
        """The workers that last, in their wanted role, the oldest first."""
        return [
            each
            for each in self._seen
            if each.revision == revision and each.lasts and role in (None, self._wanted.role_of(each))
        ]

    def _is_able(self, worker: Seen) -> bool:
        """It serves, without another step or a command in progress."""
        return worker.phase is Phase.SERVING and not worker.is_busy and worker.name not in self.moving

    def _can_spare(self, worker: Seen) -> bool:
        """Whether its revision has another first stage besides this worker and those that move."""
        return not worker.is_first or any(
            each.is_first and each.name != worker.name and each.name not in self.moving
            for each in self._seen
            if each.revision == worker.revision and self._wanted.role_of(each) == each.role
        )

    # -- roles and orders

    def flips(self) -> Iterator[Flip]:
        wanted = self._wanted
        for each in self._seen:
            to = wanted.role_of(each)
            is_forced = each.name in wanted.forced
            if self._is_able(each) and to != each.role and (is_forced or self._can_spare(each)):
                yield Flip(each.name, to, is_forced)

    def switches(self, revision: str) -> Iterator[Switch]:
        """Switches the new first stage, and when the frontend sends it requests, the others."""
        to = self._wanted.strategy
        if to not in switchable():
            return
        entry = spec_of(to).entry_role
        there = [
            each
            for each in self.of(revision)
            if each.phase is Phase.SERVING and each.strategy in switchable() and each.name not in self.moving
        ]
        first = [each for each in there if each.role == entry]
        late = [each for each in first if (each.strategy, each.is_registered) != (to, True)]
        if not late and first and all(each.is_first for each in first):
            second = (each for each in there if each.role != entry)
            late = [each for each in second if (each.strategy, each.is_registered) != (to, False)]
        for each in late:
            if not each.is_busy:
                yield Switch(each.name, to)

    def settings(self) -> Iterator[Set]:
        for each in self._seen:
            if each.lacks and self._is_able(each) and each.revision in self._wanted.revisions:
                yield Set(each.name, each.lacks)

    # -- numbers

    def numbers(self) -> Iterator[Start | Stop]:
        """Brings the current revision to the wanted numbers: starts first, then stops."""
        wanted = self._wanted
        alive = {role: self.of(wanted.revision, role) for role in wanted.workers}
        missing = {role: count - len(alive[role]) for role, count in wanted.workers.items()}
        if any(count > 0 for count in missing.values()):
            # The new revision takes the free places.
            is_in_place = wanted.in_place and wanted.following is not None
            for role, count in missing.items() if not is_in_place else ():
                yield from (Start(role, wanted.revision) for _ in range(count))
            return
        is_starting = any(each.phase is Phase.STARTING for each in self.of(wanted.revision))
        for role, count in wanted.workers.items():
            # Idle ones first, then the youngest.
            by_worth = sorted(alive[role], key=lambda each: each.phase is not Phase.SERVING)
            has_come = not any(each.phase in (Phase.STARTING, Phase.WAITING) for each in by_worth[:count])
            for each in reversed(by_worth[count:]):
                may_stop = has_come and not is_starting and self._is_able(each) and self._can_spare(each)
                if each.phase is not Phase.SERVING or may_stop:
                    yield Stop(each.name)

    # -- revisions

    def revision_changes(self) -> Adopt | Withdraw | None:
        """Changes the wish when the new revision has arrived or failed."""
        wanted = self._wanted
        if wanted.following is None:
            return None
        new = self.of(wanted.following)
        if fault := next((each.fault for each in new if each.fault), ""):
            return Withdraw(wanted.following, fault)
        serve = [each.role for each in new if each.phase is Phase.SERVING]
        roles = wanted.workers or dict.fromkeys((each.role for each in self.of(wanted.revision)), 1)
        has_come = all(serve.count(role) >= count for role, count in roles.items())
        firsts = [each for each in new if each.takes_requests]
        answers = bool(firsts) and all(each.is_first for each in firsts)
        return Adopt(wanted.following) if has_come and answers else None

    def following(self) -> Iterator[Start | Stop]:
        """Starts the new revision: second stages first, so that first stages find a pair."""
        wanted = self._wanted
        if wanted.following is None:
            return
        if wanted.in_place:
            yield from self._swap(wanted.following)
            return
        for role in self._second_stage_first():
            new, count = self.of(wanted.following, role), wanted.workers.get(role, 0)
            yield from (Start(role, wanted.following) for _ in range(count - len(new)))
            if len(new) < count or any(each.phase is not Phase.SERVING for each in new):
                return

    def _swap(self, following: str) -> Iterator[Start | Stop]:
        """Replaces one worker at a time, alternating roles so that pairs form: stops an old one, then starts one in its
        place.
        """
        wanted, new = self._wanted, self.of(following)
        if any(
            each.phase is not Phase.SERVING or (each.takes_requests and not each.is_first) for each in new
        ):
            return
        roles = [role for role in self._second_stage_first() if wanted.workers.get(role, 0)]
        if not roles:
            return
        role = min(roles, key=lambda each: len(self.of(following, each)) / wanted.workers[each])
        old = [each for each in self._seen if (each.revision, each.role) == (wanted.revision, role)]
        if len(old) + len(self.of(following, role)) < wanted.workers[role]:
            yield Start(role, following)
        elif old and all(each.lasts and not each.is_busy for each in old):
            worst = min(old, key=lambda each: each.phase is Phase.SERVING)
            if worst.name not in self.moving:
                yield Stop(worst.name, wanted.drain_seconds)

    def _second_stage_first(self) -> tuple[str, ...]:
        return spec_of(self._wanted.strategy).stop_order[::-1]

    def old_revisions(self) -> Iterator[Stop]:
        wanted = self._wanted
        old = [each for each in self._seen if each.revision not in wanted.revisions]
        is_served = any(each.is_first for each in self.of(wanted.revision))
        for roles in (*((role,) for role in spec_of(wanted.strategy).stop_order), tuple(Role)):
            if group := [each for each in old if each.role in roles]:
                for each in group:
                    if each.lasts and (is_served or each.phase is not Phase.SERVING):
                        yield Stop(each.name, wanted.drain_seconds)
                return
