"""Who has to become what, from what all workers say of themselves. Nothing is told to anybody here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trtllm_disagg.config import Role, Strategy
from trtllm_disagg.control import SWITCHABLE, Description
from trtllm_disagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Worker:
    endpoint_id: str
    instance_id: int
    is_: Description

    def __str__(self) -> str:
        return f"{self.is_.role} {self.instance_id:x}"


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """First all of `first` are told, then all of `second`. Telling somebody what it is already changes nothing, so
    that a plan which was carried out by half is finished by making it anew.
    """

    to: Strategy
    model: str
    first: tuple[Worker, ...]
    second: tuple[Worker, ...]

    @property
    def is_done(self) -> bool:
        return all(w.is_.strategy is self.to and w.is_.registered for w in self.first) and all(
            w.is_.strategy is self.to and not w.is_.registered for w in self.second
        )


def worker(endpoint_id: str, instance_id: int, said: dict[str, Any]) -> Worker:
    """Raises ConfigError for somebody who is no worker of ours."""
    try:
        return Worker(endpoint_id, instance_id, msgspec.convert(said, Description))
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"instance {instance_id:x} at {endpoint_id} is no trtllm-disagg worker: {error}"
        ) from None


def require_switchable(to: str) -> None:
    """Raises ConfigError for what no running deployment can become."""
    if to not in SWITCHABLE:
        raise ConfigError.bad_value(
            "--to",
            to,
            f"one of {', '.join(SWITCHABLE)}; router and agg need other workers, in a deployment of their own",
        )


def plan_switch(to: str, workers: Sequence[Worker]) -> SwitchPlan:
    """Raises ConfigError, naming what is allowed, when `to` is no strategy that these workers can run."""
    require_switchable(to)
    roles = Counter(w.is_.role for w in workers)
    there = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
    if not roles[Role.PREFILL] or not roles[Role.DECODE]:
        raise ConfigError.bad_value(
            "--to",
            to,
            f"a strategy whose workers are there; it needs prefill and decode, there are: {there} (at the usual "
            "endpoints of the namespace; none of their own by --endpoint or --next-endpoint)",
        )
    fixed = {w.is_.strategy for w in workers if w.is_.role is not Role.AGG} - set(SWITCHABLE)
    if fixed or roles[Role.AGG]:
        raise ConfigError.bad_value(
            "--to",
            to,
            f"no switch of a deployment of {there} under {', '.join(fixed) or 'agg'}: its frontend treats them "
            "otherwise; start another deployment",
        )
    for each in workers:
        if each.is_.fixed_by:
            raise ConfigError.bad_value(
                "--to",
                to,
                f"no switch: {each} was started with {' and '.join(each.is_.fixed_by)}; only workers at the usual "
                "endpoints can be switched",
            )
    models = sorted({w.is_.model for w in workers})
    if len(models) > 1:
        raise ConfigError.bad_value(
            "--namespace", ", ".join(models), "the namespace of one model; there are several in this one"
        )
    strategy = Strategy(to)
    first = tuple(w for w in workers if w.is_.role is strategy.first_stage_role)
    return SwitchPlan(strategy, models[0], first, tuple(w for w in workers if w not in first))
