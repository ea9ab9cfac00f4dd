"""What the workers of a deployment do next: `reconcile` compares what is wanted with what is seen.

Pure: no process, no clock, no order of events. `up` and the commands for a fleet call it after each look, and carry out
the steps that it returns; a command that was cut, a worker that comes late in an old revision or an old role, and a
death in the middle are only another thing that is seen.

On the way to what is wanted
- a first stage stops, flips or becomes a second stage only while another one of its revision answers, unless none is
  wanted in the end, or the operator forces it;
- workers of an old revision stop only while the current one answers, the first stage before the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from trtllm_disagg.admin.commands import Description
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import require_switchable, spec_of, switchable


class Phase(StrEnum):
    """What a worker does, as far as a deployment's next step depends on it."""

    STARTING = "starting"
    SERVING = "serving"
    #: It finishes its requests, to end or to flip.
    LEAVING = "leaving"
    #: It died, and starts again after a delay.
    WAITING = "waiting for its next start"
    #: It died too often, and starts no more by itself. It keeps its place until the wish changes.
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker at one look."""

    name: str
    role: str
    phase: Phase
    strategy: str = ""
    revision: str = ""
    #: The role that it flips to.
    becomes: str = ""
    #: Frontends may send it requests: it has told them.
    is_registered: bool = False
    #: The frontend does send it requests; of a revision that is on its way: it has answered one.
    answers: bool = False
    #: Requests of frontends that it answers now.
    requests: int = 0
    #: Why it cannot serve: it died before it was ever ready, or the frontend gets no answer from it.
    fault: str = ""
    #: A command to it is on its way.
    is_busy: bool = False

    @property
    def takes_requests(self) -> bool:
        return self.is_registered and takes_requests(self.role, self.strategy)

    @property
    def is_first(self) -> bool:
        """A first stage that answers."""
        return self.phase is Phase.SERVING and self.takes_requests and self.answers

    @property
    def lasts(self) -> bool:
        """It is there in the end, unless a step stops it."""
        return self.phase is not Phase.LEAVING or bool(self.becomes)


def takes_requests(role: str, strategy: str) -> bool:
    """Whether clients get their answers from that role; under `router` the frontend calls both."""
    return role == Role.AGG or (bool(strategy) and role == (spec_of(strategy).entry_role or Role.DECODE))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wish. Commands replace it, and nothing else does but `Adopt` and `Withdraw`."""

    strategy: str
    #: The current revision.
    revision: str = ""
    #: Number of workers by role; empty: as many as there are, where another program starts and stops them.
    workers: Mapping[str, int] = field(default_factory=dict)
    #: Worker -> its role, for workers that a wish has flip.
    roles: Mapping[str, str] = field(default_factory=dict)
    #: Workers that flip even as the last one of their role.
    forced: frozenset[str] = frozenset()
    #: The revision that takes the place of the current one as soon as it answers.
    following: str | None = None
    #: Its workers come one by one, each in the place (on the GPUs) of one that has stopped.
    in_place: bool = False
    #: Of the workers that a new revision replaces; None: their own.
    drain_seconds: float | None = None

    def role_of(self, worker: Seen) -> str:
        return self.roles.get(worker.name) or worker.becomes or worker.role

    @property
    def revisions(self) -> tuple[str, ...]:
        return (self.revision,) if self.following is None else (self.revision, self.following)


def taken_back(now: Wanted, before: Wanted, after: Wanted) -> Wanted:
    """`now` without what changed from `before` to `after`; what has changed since then stays."""
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
    """The worker finishes its requests, for `drain_seconds` at most (None: its own limit), and ends."""

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
class Adopt:
    """The revision that followed is the current one from now on."""

    revision: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The revision that followed does not come; the current one stays."""

    revision: str
    why: str


Step = Start | Stop | Flip | Switch | Adopt | Withdraw


def reconcile(wanted: Wanted, seen: Sequence[Seen]) -> list[Step]:
    """The steps that can be taken now, all of them at once. Empty: nothing is to be done before the next look.

    The caller sees a worker that it starts or stops as STARTING or LEAVING from then on, and one with a command on its
    way as busy.
    """
    view = _View(wanted, seen)
    if change := view.revision_changes():
        return [change]
    steps: list[Step] = [*view.flips()]
    for revision in wanted.revisions:
        steps += view.switches(revision)
    steps += view.numbers()
    steps += view.following()
    steps += view.old_revisions()
    moved = [step.name for step in steps if isinstance(step, Stop | Flip | Switch)]
    assert len(moved) == len({*moved}), "one step a worker"
    return steps


def check_switch(to: str, now: str, workers: Sequence[Description]) -> None:
    """Raises ConfigError, which names what is allowed, when workers of the strategy `now` cannot run `to`."""
    require_switchable(to)
    roles = Counter(each.role for each in workers)
    there = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
    if now not in switchable() or roles[Role.AGG]:
        raise ConfigError.bad_value(
            "--to",
            to,
            f"no switch of a deployment of {there} under {now}: its frontend treats them otherwise; start another "
            "deployment",
        )
    if missing := [role for role in (Role.PREFILL, Role.DECODE) if not roles[role] and workers]:
        raise ConfigError(
            f"there is no {' and no '.join(missing)} worker, and --to {to} needs both roles (there are: {there}); "
            "switch when one is ready at the usual endpoint of the namespace, not at one of its own by --endpoint or "
            "--next-endpoint"
        )
    for each in workers:
        if each.fixed_by:
            name = each.process or each.role
            raise ConfigError.bad_value(
                "--to",
                to,
                f"no switch: {name} was started with {' and '.join(each.fixed_by)}; only workers at the usual "
                "endpoints can be switched",
            )
    models = sorted({each.model for each in workers})
    if len(models) > 1:
        raise ConfigError.bad_value(
            "--namespace", ", ".join(models), "the namespace of one model; there are several in this one"
        )


class _View:
    """One look at the workers, beside what is wanted."""

    def __init__(self, wanted: Wanted, seen: Sequence[Seen]) -> None:
        self._wanted = wanted
        self._seen = seen
        #: Workers with a step in this round: another rule leaves them alone.
        self._moving: set[str] = set()

    def of(self, revision: str, role: str | None = None) -> list[Seen]:
        """The workers that last, in their wanted role, the oldest first."""
        return [
            each
            for each in self._seen
            if each.revision == revision and each.lasts and role in (None, self._wanted.role_of(each))
        ]

    def _can_spare(self, worker: Seen) -> bool:
        """Whether requests find another first stage of its revision without this worker and those that move."""
        return not worker.is_first or any(
            each.is_first and each.name != worker.name and each.name not in self._moving
            for each in self._seen
            if each.revision == worker.revision and self._wanted.role_of(each) == each.role
        )

    # -- roles and orders

    def flips(self) -> Iterator[Flip]:
        wanted = self._wanted
        for each in self._seen:
            to = wanted.role_of(each)
            is_forced = each.name in wanted.forced
            if each.phase is not Phase.SERVING or each.is_busy or to == each.role:
                continue
            if is_forced or self._can_spare(each):
                self._moving.add(each.name)
                yield Flip(each.name, to, is_forced)

    def switches(self, revision: str) -> Iterator[Switch]:
        """First the new first stage, and when the frontend sends it requests the others."""
        to = self._wanted.strategy
        if to not in switchable():
            return
        entry = spec_of(to).entry_role
        there = [
            each
            for each in self.of(revision)
            if each.phase is Phase.SERVING and each.strategy in switchable() and each.name not in self._moving
        ]
        first = [each for each in there if each.role == entry]
        late = [each for each in first if (each.strategy, each.is_registered) != (to, True)]
        if not late and first and all(each.is_first for each in first):
            second = (each for each in there if each.role != entry)
            late = [each for each in second if (each.strategy, each.is_registered) != (to, False)]
        for each in late:
            if not each.is_busy:
                self._moving.add(each.name)
                yield Switch(each.name, to)

    # -- numbers

    def numbers(self) -> Iterator[Start | Stop]:
        """The current revision gets as many workers as are wanted: new ones come first, then others leave."""
        wanted = self._wanted
        alive = {role: self.of(wanted.revision, role) for role in wanted.workers}
        missing = {role: count - len(alive[role]) for role, count in wanted.workers.items()}
        if any(count > 0 for count in missing.values()):
            # The revision that follows takes the free places.
            for role, count in missing.items() if not self._rolls_in_place else ():
                yield from (Start(role, wanted.revision) for _ in range(count))
            return
        is_starting = any(each.phase is Phase.STARTING for each in self.of(wanted.revision))
        for role, count in wanted.workers.items():
            # Those that do not serve leave first, then the youngest.
            by_worth = sorted(alive[role], key=lambda each: each.phase is not Phase.SERVING)
            has_come = not any(each.phase in (Phase.STARTING, Phase.WAITING) for each in by_worth[:count])
            for each in reversed(by_worth[count:]):
                if each.phase is not Phase.SERVING or (has_come and not is_starting and self._may_stop(each)):
                    self._moving.add(each.name)
                    yield Stop(each.name)

    def _may_stop(self, worker: Seen) -> bool:
        return worker.name not in self._moving and not worker.is_busy and self._can_spare(worker)

    # -- revisions

    def revision_changes(self) -> Adopt | Withdraw | None:
        """The wish itself changes when the new revision has come, or cannot come."""
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

    @property
    def _rolls_in_place(self) -> bool:
        return self._wanted.in_place and self._wanted.following is not None

    def following(self) -> Iterator[Start | Stop]:
        """Workers of the revision that follows: the second stage first, so that a first stage finds its pair."""
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
        """One worker at a time, in turns of the roles, so that pairs form within the revision: an old one stops, and
        when its place is free a new one starts there.
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
            if worst.name not in self._moving:
                self._moving.add(worst.name)
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
