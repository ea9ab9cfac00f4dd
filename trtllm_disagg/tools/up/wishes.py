"""The commands to an `up`: each checks what it wants, changes the wish, and waits until the workers are so."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from trtllm_disagg.admin.commands import Flip, Rollout, Scale, Switch
from trtllm_disagg.config.worker_config import check_value
from trtllm_disagg.errors import ConfigError, DisaggError, InvalidRequestError
from trtllm_disagg.processes import machine
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.keeper import Change, Keeper, Say
from trtllm_disagg.tools.up.plan import MOST_WORKERS, DeploymentConfig, ProcessRole
from trtllm_disagg.tools.up.reconcile import Phase, Seen, Start, Wanted, check_switch
from trtllm_disagg.tools.up.supervisor import Supervisor
from trtllm_disagg.tools.up.workers import check_workers, needs_of, with_workers

#: How long a switch waits for the requests of the old first stage.
_FINISH_SECONDS = 60.0


@dataclass
class Wish:
    """One command. `change` is its part of the wish while it waits: `Undo` takes that back."""

    keeper: Keeper
    supervisor: Supervisor
    say: Say
    change: Change | None = None

    def _accept(
        self,
        after: Wanted,
        stands: Callable[[Wanted], bool],
        *,
        needs_all: bool = False,
        may_start: bool = False,
    ) -> Change:
        before = self.keeper.wanted
        self.change = Change(before, after, self.say, stands, needs_all=needs_all, may_start=may_start)
        self.keeper.accept(self.change)
        return self.change

    def end(self) -> None:
        """The command waits no longer."""
        if self.change is not None:
            self.keeper.end(self.change)

    # -- scale

    async def scale(self, command: Scale) -> dict[str, int]:
        """Returns the number of workers by role. Raises ConfigError before anything is changed, and
        DeploymentFailedError when a new worker does not become ready: then the numbers are as before.
        """
        keeper, counts = self.keeper, self._checked_counts(command.workers)

        def is_so() -> bool:
            there = [each for each in keeper.of() if keeper.wanted.role_of(each) in counts]
            serving = Counter(each.role for each in there if each.phase is Phase.SERVING)
            return len(there) == serving.total() and all(serving[role] == n for role, n in counts.items())

        await keeper.forget_ended()
        async with keeper.fresh_look():
            wanted = replace(keeper.wanted, workers={**keeper.wanted.workers, **counts})
            if command.by_flips:
                wanted = self._with_flips(wanted)
            self._require_room(wanted)
            change = self._accept(
                wanted,
                lambda now: counts.items() <= now.workers.items(),
                needs_all=True,
                may_start=command.by_flips,
            )
        await keeper.until(change, is_so)
        return keeper.numbers()

    def _checked_counts(self, workers: Mapping[str, int]) -> dict[str, int]:
        strategy = self.keeper.wanted.strategy
        roles = spec_of(strategy).roles
        for role, count in workers.items():
            if role not in roles:
                flags = ", ".join("--" + name for name in roles)
                raise ConfigError.bad_value(
                    f"--{role}", count, f"one of {flags}: {strategy} has no other workers"
                )
            if not 1 <= count <= MOST_WORKERS:
                raise ConfigError.bad_value(f"--{role}", count, f"1 to {MOST_WORKERS} workers")
        return {**workers}

    def _with_flips(self, wanted: Wanted) -> Wanted:
        """Workers with the fewest requests change roles, as far as one role has too many and another too few."""
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

    def _require_room(self, wanted: Wanted) -> None:
        """Raises ConfigError where the workers that are missing find no GPUs."""
        there = Counter(wanted.role_of(each) for each in self.keeper.of() if each.lasts)
        missing = (
            Start(role, wanted.revision)
            for role, count in wanted.workers.items()
            for _ in range(count - there[role])
        )
        self.keeper.specs(missing)

    # -- flip

    async def flip(self, command: Flip) -> dict[str, Any]:
        """Returns the outcome, as `trtllm-disagg flip --json` prints it. Raises ConfigError for another worker, and
        InvalidRequestError for one that cannot flip; then nothing has changed.
        """
        keeper, to, began = self.keeper, command.to, time.monotonic()
        async with keeper.fresh_look():
            one = self._worker(command.process)
            was = f"{one.role} {self._instance(one.name)}"
            wanted = self._with_flip(command, one)
            change = self._accept(wanted, lambda now: now.roles.get(one.name) == to)

        def is_so() -> bool:
            return any(
                (each.name, each.role, each.phase, each.is_busy) == (one.name, to, Phase.SERVING, False)
                for each in keeper.of()
            )

        await keeper.until(change, is_so)
        return {
            "was": was,
            "role": to,
            "instance": self._instance(one.name),
            "process": one.name,
            "seconds": time.monotonic() - began,
            "warnings": change.warnings,
        }

    def _with_flip(self, command: Flip, one: Seen) -> Wanted:
        wanted, to = self.keeper.wanted, command.to
        if wanted.role_of(one) == to == one.role:
            allowed = f"a worker of the other role: {one.name} is a {to} worker"
            raise ConfigError.bad_value("--instance", command.process, allowed)
        counts = {**wanted.workers}
        if wanted.role_of(one) != to:
            counts.update({one.role: counts[one.role] - 1, to: counts[to] + 1})
        if not counts[one.role] and not command.force:
            raise InvalidRequestError(
                f"--to: {to!r} is not allowed; expected another {one.role} worker beside it: it is the last {one.role} "
                "worker (--force)"
            )
        forced = wanted.forced | {one.name} if command.force else wanted.forced - {one.name}
        return replace(wanted, workers=counts, roles={**wanted.roles, one.name: to}, forced=forced)

    def _worker(self, name: str) -> Seen:
        """By its process or its instance id."""
        workers = self.keeper.of()
        for each in workers:
            if name in (each.name, self._instance(each.name)):
                return each
        there = ", ".join(f"{each.name} ({each.role} {self._instance(each.name)})" for each in workers)
        raise ConfigError.bad_value("--instance", name, f"one of {there or 'none: no worker is there'}")

    def _instance(self, name: str) -> str:
        told = self.keeper.described_as(name)
        return told.instance if told else ""

    def _label(self, worker: Seen) -> str:
        return f"{worker.role} {self._instance(worker.name) or worker.name}"

    # -- switch

    async def switch(self, command: Switch) -> dict[str, Any]:
        """Returns the outcome, as `trtllm-disagg switch --json` prints it. Raises ConfigError before any worker is
        changed.
        """
        keeper, to, began = self.keeper, command.to, time.monotonic()

        def runs_it() -> bool:
            serving = [each for each in keeper.of() if each.phase is Phase.SERVING]
            return all(each.strategy == to and each.is_registered == each.is_first for each in serving)

        outcome: dict[str, Any] = {"model": keeper.config.served_model_name, "strategy": to}
        async with keeper.fresh_look():
            told = [told for each in keeper.of() if (told := keeper.described_as(each.name))]
            check_switch(to, keeper.wanted.strategy, [each.description for each in told])
            if keeper.wanted.strategy == to and runs_it():
                return outcome | {"first": self._first(), "seconds": None, "requests_left": 0}
            wanted = replace(keeper.wanted, strategy=to)
            change = self._accept(wanted, lambda now: now.strategy == to)
        await keeper.until(change, runs_it)
        deadline = time.monotonic() + _FINISH_SECONDS
        await keeper.until(change, lambda: not self._left() or time.monotonic() > deadline)
        took = {"seconds": time.monotonic() - began, "requests_left": self._left()}
        return outcome | {"first": self._first(), **took}

    def _first(self) -> list[str]:
        return [self._label(each) for each in self.keeper.of() if each.takes_requests]

    def _left(self) -> int:
        """Requests of the stage that was the first one."""
        return sum(each.requests for each in self.keeper.of() if not each.takes_requests)

    # -- rollout

    async def roll_out(self, command: Rollout) -> dict[str, Any]:
        """Returns the outcome, as `trtllm-disagg rollout --json` prints it. Raises ConfigError before anything is
        changed, and DeploymentFailedError when the new revision does not come: the old one stays.
        """
        keeper, to = self.keeper, command.revision
        async with keeper.fresh_look():
            wanted = keeper.wanted
            withdrawn = wanted.following if to == wanted.revision else None
            if withdrawn is not None:
                wanted = replace(wanted, following=None, in_place=False)
            elif to not in wanted.revisions:
                wanted = self._with_revision(command)
            leaving = [self._label(each) for each in keeper.seen if each.revision != to]
            change = self._accept(wanted, lambda now: to in now.revisions)

        def is_done() -> bool:
            return keeper.wanted.revision == to and all(each.revision == to for each in keeper.seen)

        await keeper.until(change, is_done)
        serving = [self._label(each) for each in keeper.of()]
        return {"revision": to, "serving": serving, "left": leaving, "requests_given_up": change.given_up}

    def _with_revision(self, command: Rollout) -> Wanted:
        keeper, supervisor = self.keeper, self.supervisor
        config = self._config_of(command)
        wanted = replace(
            keeper.wanted,
            following=command.revision,
            drain_seconds=command.drain_seconds,
            in_place=command.in_place,
        )
        supervisor.other_configs[command.revision] = config
        counts = {role: count for role, count in wanted.workers.items() if count}
        try:
            if not command.in_place:
                keeper.specs(
                    Start(role, command.revision) for role, count in counts.items() for _ in range(count)
                )
        except ConfigError as error:
            del supervisor.other_configs[command.revision]
            raise ConfigError(f"{error}; --in-place replaces one worker at a time, on its own GPUs") from None
        if command.in_place:
            self._say_what_is_missing(counts)
        return wanted

    def _say_what_is_missing(self, counts: Mapping[str, int]) -> None:
        for role, count in counts.items():
            least = f"{count - 1} of {count}" if count > 1 else "none"
            self.say(f"{least} {role} workers serve while one of them loads")
            if count == 1 and role in spec_of(self.keeper.wanted.strategy).kv_routed_roles:
                self.say(f"no worker takes requests while {role} loads: they get an error")

    def _config_of(self, command: Rollout) -> DeploymentConfig:
        supervisor, wanted = self.supervisor, self.keeper.wanted
        check_value("worker_revision", command.revision, "--to")
        if wanted.following is not None:
            allowed = f"{wanted.following}, which is on its way, or {wanted.revision!r} to take that back"
            raise ConfigError.bad_value("--to", command.revision, allowed)
        if command.revision in {each.revision for each in self.keeper.seen}:
            raise ConfigError.bad_value("--to", command.revision, "a name that no worker of this `up` has")
        old = supervisor.config
        argv = (command.python, *old.worker_command[1:]) if command.python else old.worker_command
        configs = {cast(ProcessRole, role): Path(file) for role, file in command.engine_configs.items()}
        config = replace(
            old,
            revision=command.revision,
            model=command.model or old.model,
            engine_configs=configs or old.engine_configs,
            worker_args=command.worker_args or old.worker_args,
            worker_command=argv,
        )
        config = with_workers(config, supervisor.environ)
        check_workers(config, supervisor.environ)
        needs = machine.Needs() if command.in_place else needs_of(config)
        for shortage in machine.check_limits(needs):
            self.say(f"warning: {shortage}")
        return config

    # -- undo

    def undo(self) -> None:
        """Take back what this command has changed, as far as it is not done."""
        if self.change is not None:
            self.keeper.take_back(self.change, DisaggError("taken back"))
