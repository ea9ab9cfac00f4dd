"""How many workers of each role a deployment needs, by what it measured in the last looks. No process, no clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.tools.top.snapshot import Process, Snapshot, latency, share_within

#: Looks in a row before a worker moves: a late request hurts, an idle worker only costs.
_LOOKS_LATE, _LOOKS_IDLE = 2, 6
#: What the others of a role may be used to without one that changes its role or leaves.
_USED_AFTER_FLIP, _USED_AFTER_STOP = 0.85, 0.6
#: After a change: a role that is late now need not wait for a whole measurement.
_FIRST_LOOKS = 4
#: A role that is used so much gets a worker before it is late: one takes time to start.
_SOON_LATE = 0.85
#: A prefill worker that computes so much of the time is why first tokens are late.
_BUSY = 0.7
#: The blocks beyond are for the answers that are being written.
_MOST_KV = 0.85


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits in seconds: of the time to the first token, and between tokens. `share` of them are to be kept."""

    ttft: float
    itl: float
    #: Workers of each role.
    least: int = 1
    #: Workers of all roles. None: as many as there are at first.
    most: int | None = None
    share: float = 0.95


@dataclass(frozen=True, slots=True)
class Wanted:
    #: By role.
    workers: Mapping[str, int]
    why: str


@dataclass(frozen=True, slots=True)
class _Load:
    """Of a role. `use`: 1 is all that its workers can do within the limits."""

    role: str
    workers: int
    use: float
    misses_limit: bool = False

    @property
    def use_with_one_less(self) -> float:
        return self.use * self.workers / (self.workers - 1) if self.workers > 1 else float("inf")


@dataclass(slots=True)
class Ratio:
    """Moves one worker at a time. What was measured before that says nothing of what comes after it."""

    goal: Goal
    #: So many looks are one measurement.
    num_looks: int = 10
    #: Of the deployment, also those without a worker.
    roles: Sequence[str] = ()
    _most: int = 0
    _looks: deque[Snapshot] = field(default_factory=deque)
    _in_a_row: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def after(self, seen: Snapshot) -> Wanted | None:
        """What the deployment needs; None where that is what it has, or not known yet."""
        self._most = self._most or self.goal.most or len(_serving(seen))
        if self._looks and _serving(seen) != _serving(self._looks[-1]):
            self.forget()
        self._looks.append(seen)
        if len(self._looks) < _FIRST_LOOKS:
            return None
        if wanted := self._floor(seen):
            self.forget()
            return wanted
        if is_whole := len(self._looks) > self.num_looks:
            self._looks.popleft()
        if wanted := self._next([*self._loads()], is_whole):
            self.forget()
        return wanted

    def forget(self) -> None:
        self._looks.clear()
        self._in_a_row.clear()

    def _floor(self, seen: Snapshot) -> Wanted | None:
        """Whatever the load is, each role has `least` workers."""
        there = Counter(_serving(seen).values())
        few = [role for role in self.roles if there[role] < self.goal.least]
        numbers = {role: max(there[role], self.goal.least) for role in self.roles}
        return (
            Wanted(numbers, f"fewer {' and '.join(few)} workers than --least {self.goal.least}")
            if few
            else None
        )

    def _next(self, loads: Sequence[_Load], is_whole: bool) -> Wanted | None:
        are_late = (load for load in loads if load.misses_limit or (is_whole and load.use >= _SOON_LATE))
        late = max(are_late, key=lambda load: load.use, default=None)
        idle = min(loads, key=lambda load: load.use_with_one_less, default=None)
        chosen = late or (idle if is_whole else None)
        if chosen is None or not self._lasts(chosen.role, is_late=late is not None):
            return None
        workers = {load.role: load.workers for load in loads}
        if late is None:
            return self._less(workers, chosen)
        return self._more(workers, late, [load for load in loads if load is not late])

    def _less(self, workers: Mapping[str, int], idle: _Load) -> Wanted | None:
        if not self._can_lose_one(idle, _USED_AFTER_STOP):
            return None
        why = f"the limits are kept, and {idle.role} is used to {idle.use:.0%}"
        return Wanted({**workers, idle.role: idle.workers - 1}, why)

    def _more(self, workers: Mapping[str, int], late: _Load, others: Sequence[_Load]) -> Wanted | None:
        why = f"{late.role} is {'late' if late.misses_limit else 'soon late'}, and used to {late.use:.0%}"
        more = {**workers, late.role: late.workers + 1}
        for other in others:
            if self._can_lose_one(other, _USED_AFTER_FLIP):
                why += f", {other.role} to {other.use:.0%}"
                return Wanted({**more, other.role: other.workers - 1}, why)
        return Wanted(more, why) if sum(more.values()) <= self._most else None

    def _can_lose_one(self, load: _Load, most: float) -> bool:
        return load.workers > self.goal.least and load.use_with_one_less <= most

    def _lasts(self, role: str, *, is_late: bool) -> bool:
        state = (role, is_late)
        self._in_a_row = Counter({state: self._in_a_row[state] + 1})
        return self._in_a_row[state] >= (_LOOKS_LATE if is_late else _LOOKS_IDLE)

    def _loads(self) -> Iterator[_Load]:
        goal, before, now = self.goal, self._looks[0].frontend, self._looks[-1].frontend
        in_time = share_within(goal.ttft, now.ttft, before.ttft)
        evenly = share_within(goal.itl, now.itl, before.itl)
        are_late, gaps_are_long = (kept is not None and kept < goal.share for kept in (in_time, evenly))
        gaps = latency(now.itl, before.itl)
        itl = gaps.mean / goal.itl if gaps is not None else 0.0
        busy = self._mean(Role.PREFILL, lambda each: float(bool(each.load.batch or each.load.queued)))
        for role, workers in Counter(_serving(self._looks[-1]).values()).items():
            if role == Role.PREFILL:
                yield _Load(role, workers, busy, are_late and busy >= _BUSY)
                continue
            kv = self._mean(role, lambda each: each.load.kv_use or 0.0) / _MOST_KV
            # Where prefill is not the reason, a request waits for blocks or for a turn in the batch.
            misses = gaps_are_long or (are_late and (role == Role.AGG or busy < _BUSY))
            yield _Load(role, workers, max(kv, itl), misses)

    def _mean(self, role: str, of: Callable[[Process], float]) -> float:
        values = [of(each) for look in self._looks for each in look.processes if each.role == role]
        return fmean(values) if values else 0.0


def _serving(seen: Snapshot) -> dict[str, str]:
    """Name -> role."""
    return {
        each.name: each.role for each in seen.processes if each.role in set(Role) and each.state == "ready"
    }
