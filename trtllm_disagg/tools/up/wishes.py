"""Commands to an `up` or a fleet: each checks and changes the wish, and waits until it holds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtllm_disagg.admin.commands import Flip, Set, Switch
from trtllm_disagg.config.thresholds import ADMISSION, check_thresholds
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError, DisaggError, InvalidRequestError
from trtllm_disagg.strategies import spec_of, switchable
from trtllm_disagg.tools.up.commands import Rollout, Scale
from trtllm_disagg.tools.up.keeper import Change, Keeper, Say
from trtllm_disagg.tools.up.plan import MAX_WORKERS
from trtllm_disagg.tools.up.reconcile import Phase, Seen, Start, Wanted, check_switch

WishCommand = Switch | Set | Flip | Scale | Rollout
#: Max seconds that a switch waits for the old first stage's requests.
_FINISH_SECONDS = 60.0


@dataclass
class Wish:
    """One command. `change`: its part of the wish, which `Undo` takes back."""

    keeper: Keeper
    say: Say
    #: Seconds; None: no limit.
    limit: float | None = None
    change: Change | None = None

    async def come_true(self, command: WishCommand) -> Any:
        """Returns the outcome as JSON. Raises ConfigError before any change, another DisaggError for a failure, and
        StageTimeoutError after the limit.
        """
        try:
            match command:
                case Switch():
                    return await self.switch(command)
                case Set():
                    return await self.set(command)
                case Flip():
                    return await self.flip(command)
                case Scale():
                    return await self.scale(command)
                case Rollout():
                    return await self.roll_out(command)
        finally:
            if self.change is not None:
                self.keeper.end(self.change)

    def _accept(self, after: Wanted, stands: Callable[[Wanted], bool]) -> Change:
        now, seen = self.keeper.wanted, self.keeper.seen
        # So that a begun flip, taken back, flips back.
        roles = {each.name: now.role_of(each) for each in seen if each.name in after.roles}
        self.change = Change(replace(now, roles={**now.roles, **roles}), after, self.say, stands)
        self.keeper.accept(self.change)
        return self.change

    def undo(self) -> None:
        """Takes back the part of this command that is not done."""
        if self.change is not None:
            self.keeper.take_back(self.change, DisaggError("taken back"))

    # -- scale

    async def scale(self, command: Scale) -> dict[str, int]:
        """Returns role -> number of workers. A new worker that does not become ready (DeploymentFailedError) restores
        the old numbers.
        """
        keeper, counts = self.keeper, command.workers
        self._check(counts)

        def is_so() -> bool:
            there = [each for each in keeper.of() if keeper.wanted.role_of(each) in counts]
            serving = {each.name: each.role for each in there if each.phase is Phase.SERVING}
            if not wanted.workers:
                return wanted.roles.items() <= serving.items()
            have = Counter(serving.values())
            return len(there) == len(serving) and all(have[role] == n for role, n in counts.items())

        await keeper.forget_ended()
        async with keeper.fresh_look():
            wanted = replace(keeper.wanted, workers={**keeper.wanted.workers, **counts})
            if command.by_flips:
                wanted = self._with_flips(wanted)
            if not keeper.wanted.workers:  # another program starts and stops them
                wanted = replace(wanted, workers={})
            there = Counter(wanted.role_of(each) for each in keeper.of() if each.lasts)
            keeper.require_room(
                Start(role, wanted.revision)
                for role, count in wanted.workers.items()
                for _ in range(count - there[role])
            )
            change = self._accept(
                wanted, lambda now: not now.workers or counts.items() <= now.workers.items()
            )
            change.needs_all, change.may_start = True, command.by_flips
        await keeper.until(change, is_so, self.limit)
        return keeper.numbers()

    def _check(self, workers: Mapping[str, int]) -> None:
        strategy = self.keeper.wanted.strategy
        roles = spec_of(strategy).roles
        for role, count in workers.items():
            if role not in roles:
                flags = ", ".join("--" + name for name in roles)
                allowed = f"one of {flags}: {strategy} has no other workers"
                raise ConfigError.bad_value(f"--{role}", count, allowed)
            if not 1 <= count <= MAX_WORKERS:
                raise ConfigError.bad_value(f"--{role}", count, f"1 to {MAX_WORKERS} workers")

    def _with_flips(self, wanted: Wanted) -> Wanted:
        """Flips the workers with the fewest requests from roles with too many to roles with too few."""
        serving = [each for each in self.keeper.of() if each.phase is Phase.SERVING]
        there = Counter(wanted.role_of(each) for each in serving)
        for to, of in (("prefill", "decode"), ("decode", "prefill")):
            idle = sorted(
                (each for each in serving if wanted.role_of(each) == of), key=lambda each: each.requests
            )
            missing, spare = wanted.workers.get(to, 0) - there[to], there[of] - wanted.workers.get(of, 0)
            moving = {each.name: to for each in idle[: max(0, min(missing, spare))]}
            wanted = replace(wanted, roles={**wanted.roles, **moving})
        return wanted

    # -- flip

    async def flip(self, command: Flip) -> dict[str, Any]:
        """Raises InvalidRequestError, without a change, if the worker cannot flip. A flip that was done is not
        repeated.
        """
        keeper, to, began = self.keeper, command.to, time.monotonic()

        def now() -> Seen | None:
            return next((each for each in keeper.seen if each.name == one.name), None)

        def is_so() -> bool:
            there, done = now(), (to, Phase.SERVING, False)
            return there is not None and (there.role, there.phase, there.is_busy) == done

        async with keeper.fresh_look():
            one = self._worker(command.process, keeper.of())
            change = self._accept(self._with_flip(command, one), lambda now: now.roles.get(one.name) == to)
        late = f"{one.name} is not {to}: it is still finishing its requests"
        await keeper.until(change, is_so, self.limit, late)
        there = now() or one
        return {
            "was": one.label,
            "role": to,
            "instance": there.instance,
            "process": there.description.process if there.description else one.name,
            "seconds": time.monotonic() - began,
            "warnings": change.warnings,
        }

    def _with_flip(self, command: Flip, one: Seen) -> Wanted:
        wanted, to = self.keeper.wanted, command.to
        counts, was = Counter(wanted.workers or self.keeper.numbers()), wanted.role_of(one)
        if was == to == one.role and not (one.description and one.description.flipped_from):
            allowed = f"a worker of the other role: {one.name} is a {to} worker"
            raise ConfigError.bad_value("--instance", command.process, allowed)
        if was != to:
            counts.subtract({was: 1, to: -1})
        if not counts[one.role] and not command.force:
            raise InvalidRequestError(
                f"--to: {to!r} is not allowed; expected another {one.role} worker beside it: it is the last {one.role} "
                "worker (--force)"
            )
        forced = wanted.forced | {one.name} if command.force else wanted.forced - {one.name}
        numbers = {role: counts[role] for role in wanted.workers}
        return replace(wanted, workers=numbers, roles={**wanted.roles, one.name: to}, forced=forced)

    def _worker(self, name: str, workers: Sequence[Seen]) -> Seen:
        """Finds it by process name or instance id."""
        for each in workers:
            if name == each.name or name.lower() == each.instance:
                return each
        there = ", ".join(
            each.name if each.name == each.label else f"{each.name} ({each.label})" for each in workers
        )
        raise ConfigError.bad_value("--instance", name, f"one of {there or 'none: no worker is there'}")

    # -- switch

    async def switch(self, command: Switch) -> dict[str, Any]:
        """The deployment serves even if this process dies midway: in the old order, the new one, or both."""
        keeper, to, began = self.keeper, command.to, time.monotonic()

        def runs_it() -> bool:
            serving = [each for each in keeper.of() if each.phase is Phase.SERVING]
            is_each = all(each.strategy == to and each.is_registered == each.is_first for each in serving)
            return is_each and (not serving or any(each.is_first for each in serving))

        def outcome(seconds: float | None) -> dict[str, Any]:
            first = [each.label for each in keeper.of() if each.takes_requests]
            result = {"model": keeper.model, "strategy": to, "first": first, "seconds": seconds}
            return result | {"requests_left": left() if seconds else 0}

        def left() -> int:
            """Requests of the old first stage."""
            return sum(each.requests for each in keeper.of() if not each.takes_requests)

        async with keeper.fresh_look():
            check_switch(to, keeper.wanted.strategy, keeper.of())
            if keeper.wanted.strategy == to and runs_it():
                return outcome(None)
            change = self._accept(replace(keeper.wanted, strategy=to), lambda now: now.strategy == to)
        late = "some workers still have the old order; repeat the command, or switch back"
        await keeper.until(change, runs_it, self.limit, late)
        deadline = time.monotonic() + (_FINISH_SECONDS if self.limit is None else self.limit)
        await keeper.until(change, lambda: not left() or time.monotonic() > deadline)
        return outcome(time.monotonic() - began)

    # -- rollout

    async def roll_out(self, command: Rollout) -> dict[str, Any]:
        """If the new revision fails (DeploymentFailedError), the old one stays."""
        keeper, to = self.keeper, command.revision
        async with keeper.fresh_look():
            wanted = keeper.wanted
            if to == wanted.revision and wanted.following is not None:
                wanted = replace(wanted, following=None, in_place=False)
            elif to not in wanted.revisions:
                keeper.prepare(command, self.say)
                wanted = replace(
                    wanted, following=to, drain_seconds=command.drain_seconds, in_place=command.in_place
                )
            left = {each.name: each.label for each in keeper.seen if each.revision != to}
            change = self._accept(wanted, lambda now: to in now.revisions)

        def is_done() -> bool:
            others = [each for each in keeper.seen if each.revision != to]
            left.update((each.name, left.get(each.name, each.label)) for each in others)
            return not others

        late = f"revision {to} does not answer the frontend with a worker of each role; the old ones stay"
        await keeper.until(change, lambda: keeper.wanted.revision == to, self.limit, late)
        await keeper.until(change, is_done)
        serving = [each.label for each in keeper.of()]
        return {
            "revision": to,
            "serving": serving,
            "left": [*left.values()],
            "requests_given_up": change.given_up,
        }

    # -- set

    async def set(self, command: Set) -> list[dict[str, Any]]:
        """Returns each worker's changes, or the reason for none. A value that every worker refuses leaves the wish."""
        keeper, values = self.keeper, command.values
        check_thresholds(values, "set")
        for_all = {} if command.process else values
        async with keeper.fresh_look():
            names = [each.name for each in self._takers(command)]
            if for_all:
                keeper.note(
                    ", ".join(f"{name}={value}" for name, value in for_all.items())
                    + " are now the thresholds"
                )
            keeper.send_settings(names, values)
            wanted = replace(keeper.wanted, thresholds={**keeper.wanted.thresholds, **for_all})
            change = self._accept(wanted, lambda now: for_all.items() <= now.thresholds.items())

        def is_so() -> bool:
            there = (each for each in keeper.seen if each.phase in (Phase.STARTING, Phase.SERVING))
            return not any(each.lacks for each in there if each.name in names)

        await keeper.until(change, is_so, self.limit, "a worker is still starting, with the old thresholds")
        result = [change.settings[name] for name in names if name in change.settings]
        if result and all(each["error"] for each in result):
            self.undo()
        return result

    def _takers(self, command: Set) -> list[Seen]:
        workers = [each for each in self.keeper.seen if each.revision in self.keeper.wanted.revisions]
        paired = [each for each in workers if each.role != Role.AGG and each.strategy in switchable()]
        takers = workers if command.values.keys() <= {*ADMISSION} else paired
        if workers and not takers:
            there = ", ".join(f"{each.label} under {each.strategy}" for each in workers)
            allowed = f"prefill or decode workers of {', '.join(switchable())}; there is: {there}"
            raise ConfigError.bad_value("set", "thresholds", allowed)
        return [self._worker(command.process, takers)] if command.process else takers
