"""The only list of strategies, read by all code. A new strategy is one line here and one file with its builder
(`handlers/strategies/`).

For scripts: `python -m trtllm_disagg.strategies STRATEGY` prints the roles in stopping order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_disagg.types import Generate

WorkerRole = Literal["agg", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class StrategySpec:
    name: str
    #: The roles of the deployment's workers.
    roles: tuple[WorkerRole, ...]
    #: The role that gets the frontend's requests and calls the other role; None: the frontend calls both.
    entry_role: WorkerRole | None
    #: A running deployment can switch to it from another switchable strategy.
    switchable: bool
    #: Callers stop first, so that requests in flight still find their next stage.
    stop_order: tuple[WorkerRole, ...]
    #: "module:function" that turns `handlers.services.StrategyParts` into a `Generate` for whole requests; None: each
    #: request runs as one of the other strategies, chosen on arrival.
    builder: str | None
    #: The decider in simulations by `trtllm-disagg plan`; None: not simulated.
    planned_with: str | None = "always"

    @property
    def first_role(self) -> WorkerRole:
        """The role that gets a request first. The frontend's own chain begins with prefill."""
        return self.entry_role or "prefill"

    @property
    def chooses_order(self) -> bool:
        """Each request runs as one of the other strategies."""
        return self.builder is None

    @property
    def kv_routed_roles(self) -> tuple[WorkerRole, ...]:
        """The roles that the frontend's KV router picks."""
        return self.roles if self.entry_role is None else (self.entry_role,)

    @property
    def is_disaggregated(self) -> bool:
        return len(self.roles) > 1

    @property
    def is_run_by_workers(self) -> bool:
        """Workers call workers of the other role."""
        return self.is_disaggregated and self.entry_role is not None

    @property
    def is_order(self) -> bool:
        """Workers run every request in one order of phases."""
        return self.is_run_by_workers and not self.chooses_order

    def load_builder(self) -> Callable[[Any], Generate]:
        """Import the builder only when called: this module is below the handlers."""
        assert self.builder is not None, f"{self.name} chooses among the others"
        module, _, function = self.builder.partition(":")
        build: Callable[[Any], Generate] = getattr(import_module(module), function)
        return build


_BOTH: tuple[WorkerRole, ...] = ("prefill", "decode")
_DECODE_FIRST: tuple[WorkerRole, ...] = ("decode", "prefill")
_BUILDERS = "trtllm_disagg.handlers.strategies"

STRATEGIES: dict[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        StrategySpec("agg", ("agg",), "agg", False, ("agg",), f"{_BUILDERS}.agg:build"),
        StrategySpec("prefill_first", _BOTH, "prefill", True, _BOTH, f"{_BUILDERS}.prefill_first:build"),
        StrategySpec(
            "decode_first", _BOTH, "decode", True, _DECODE_FIRST, f"{_BUILDERS}.decode_first:build", "length"
        ),
        # The simulation, where software takes no time, treats it as prefill_first.
        StrategySpec("router", _BOTH, None, False, _BOTH, f"{_BUILDERS}.router:build", planned_with=None),
        # Its workers register with the frontend as those of decode_first do.
        StrategySpec("auto", _BOTH, "decode", True, _DECODE_FIRST, None),
    )
}


def spec_of(name: str) -> StrategySpec:
    """Raises ConfigError for a name that is not in the table."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ConfigError.bad_value("strategy", name, f"one of {', '.join(STRATEGIES)}") from None


def disaggregated() -> tuple[str, ...]:
    """The values of `--disaggregation-strategy`."""
    return tuple(name for name, spec in STRATEGIES.items() if spec.is_disaggregated)


def run_by_workers() -> tuple[str, ...]:
    return tuple(name for name, spec in STRATEGIES.items() if spec.is_run_by_workers)


def orders() -> tuple[StrategySpec, ...]:
    return tuple(spec for spec in STRATEGIES.values() if spec.is_order)


def switchable() -> tuple[str, ...]:
    return tuple(name for name, spec in STRATEGIES.items() if spec.switchable)


def require_switchable(name: str, key: str = "--to") -> None:
    """Raises ConfigError, naming `key`, for a strategy that a running deployment cannot switch to."""
    if name not in switchable():
        raise ConfigError.bad_value(
            key,
            name,
            f"one of {', '.join(switchable())}; router and agg need other workers, in a deployment of their own",
        )


def main(arguments: list[str]) -> str:
    name = arguments[0] if arguments else ""
    if name not in disaggregated():
        allowed = ", ".join(disaggregated())
        raise SystemExit(f"error: STRATEGY: {name!r} is not allowed; expected one of {allowed}")
    return " ".join(STRATEGIES[name].stop_order)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
