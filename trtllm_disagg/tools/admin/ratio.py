"""Decides the number of workers per role from the last measurements. No process, no clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.tools.top.snapshot import Process, Snapshot, latency, share_within

#: Looks in a row before a worker moves: late requests hurt more than an idle worker.
_LOOKS_LATE, _LOOKS_IDLE = 2, 6
#: Max use of the remaining workers of a role when one of them flips, or stops.
_USED_AFTER_FLIP, _USED_AFTER_STOP = 0.85, 0.6
#: Looks after a change before a late role may get another worker.
_FIRST_LOOKS = 4
#: A role at this use gets a worker before it is late, since a start takes time.
_SOON_LATE = 0.85
#: First tokens are late because of prefill when its workers compute for this share of the time.
_BUSY = 0.7
#: The remaining blocks are for answers in progress.
_MAX_KV = 0.85


@dataclass(frozen=True, slots=True)
class Goal:
    """Max seconds to the first token and between tokens, kept for `share` of them."""

    ttft: float
    itl: float
    #: Per role.
    min_workers: int = 1
    #: In all roles together. None: the number at the start.
    max_workers: int | None = None
    share: float = 0.95


@dataclass(frozen=True, slots=True)
class Wanted:
    #: By role.
    workers: Mapping[str, int]
    why: str


@dataclass(frozen=True, slots=True)
class _Load:
    """Load of one role. `use` 1: the workers reach a limit."""

    role: str
    workers: int
    use: float
    misses_limit: bool = False

    @property
    def use_with_one_less(self) -> float:
        return self.use * self.workers / (self.workers - 1) if self.workers > 1 else float("inf")


@dataclass(slots=True)
class Ratio:
    """Moves one worker at a time, and measures anew after each move."""

    goal: Goal
    #: Looks per measurement.
    num_looks: int = 10
    #: All roles of the deployment, even those without a worker.
    roles: Sequence[str] = ()
    _max_workers: int = 0
    _looks: deque[Snapshot] = field(default_factory=deque)
    _in_a_row: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def after(self, seen: Snapshot) -> Wanted | None:
        """The numbers that the deployment needs; None if it has them, or if too little is measured."""
        self._max_workers = self._max_workers or self.goal.max_workers or len(_serving(seen))
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
        """Gives each role `min_workers`, at any load."""
        there = Counter(_serving(seen).values())
        few = [role for role in self.roles if there[role] < self.goal.min_workers]
        numbers = {role: max(there[role], self.goal.min_workers) for role in self.roles}
        why = f"fewer {' and '.join(few)} workers than --min-workers {self.goal.min_workers}"
        return Wanted(numbers, why) if few else None

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
        why = f"the limits are kept, and {idle.role} is {idle.use:.0%} used"
        return Wanted({**workers, idle.role: idle.workers - 1}, why)

    def _more(self, workers: Mapping[str, int], late: _Load, others: Sequence[_Load]) -> Wanted | None:
        why = f"{late.role} is {'late' if late.misses_limit else 'near its limit'}: {late.use:.0%} used"
        more = {**workers, late.role: late.workers + 1}
        for other in others:
            if self._can_lose_one(other, _USED_AFTER_FLIP):
                why += f", {other.role} {other.use:.0%}"
                return Wanted({**more, other.role: other.workers - 1}, why)
        return Wanted(more, why) if sum(more.values()) <= self._max_workers else None

    def _can_lose_one(self, load: _Load, max_use: float) -> bool:
        return load.workers > self.goal.min_workers and load.use_with_one_less <= max_use

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
            kv = self._mean(role, lambda each: each.load.kv_use or 0.0) / _MAX_KV
            # If prefill has time left, the request waits for blocks or for its place in the batch.
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
