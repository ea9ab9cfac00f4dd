"""The one list of strategies. Configuration, deployment, commands, demo, scripts and tests read it. A new strategy is
one line here and one file with its builder (`handlers/strategies/`).

For scripts: `python -m trtllm_disagg.strategies STRATEGY` prints the roles in the order in which they stop.
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
    #: The role that takes requests from the frontend and calls the other role; None: the frontend calls each role.
    entry_role: WorkerRole | None
    #: A running deployment of another switchable strategy can become this one.
    switchable: bool
    #: A worker that is called stops after its callers, so that a request in flight still finds its next stage.
    stop_order: tuple[WorkerRole, ...]
    #: "module:function" that turns `handlers.services.StrategyParts` into a `Generate` for whole requests; None: each
    #: request runs as one of the other strategies, chosen when it comes.
    builder: str | None

    @property
    def kv_routed_roles(self) -> tuple[WorkerRole, ...]:
        """The roles that the frontend's KV router picks workers of."""
        return self.roles if self.entry_role is None else (self.entry_role,)

    @property
    def is_disaggregated(self) -> bool:
        return len(self.roles) > 1

    @property
    def is_worker_side(self) -> bool:
        """Workers call workers of the other role."""
        return self.is_disaggregated and self.entry_role is not None

    @property
    def is_order(self) -> bool:
        """A worker-side strategy that runs every request in the same order of phases."""
        return self.is_worker_side and self.builder is not None

    def load_builder(self) -> Callable[[Any], Generate]:
        """Import the builder only now: this module is below the handlers and must not import them at its start."""
        assert self.builder is not None, f"{self.name} chooses among the others"
        module, _, function = self.builder.partition(":")
        build: Callable[[Any], Generate] = getattr(import_module(module), function)
        return build


_BOTH: tuple[WorkerRole, ...] = ("prefill", "decode")
_DECODE_STOPS_FIRST: tuple[WorkerRole, ...] = ("decode", "prefill")
_BUILDERS = "trtllm_disagg.handlers.strategies"

STRATEGIES: dict[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        StrategySpec("agg", ("agg",), "agg", False, ("agg",), f"{_BUILDERS}.agg:build"),
        StrategySpec("prefill_first", _BOTH, "prefill", True, _BOTH, f"{_BUILDERS}.prefill_first:build"),
        StrategySpec(
            "decode_first", _BOTH, "decode", True, _DECODE_STOPS_FIRST, f"{_BUILDERS}.decode_first:build"
        ),
        StrategySpec("router", _BOTH, None, False, _BOTH, f"{_BUILDERS}.router:build"),
        # Its workers register with the frontend as those of decode_first do.
        StrategySpec("auto", _BOTH, "decode", True, _DECODE_STOPS_FIRST, None),
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


def worker_side() -> tuple[str, ...]:
    return tuple(name for name, spec in STRATEGIES.items() if spec.is_worker_side)


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
