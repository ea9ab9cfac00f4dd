"""The arms of a comparison: layouts of the same number of workers, under the strategies and deciders that suit them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from trtllm_disagg.config.deciders import ALWAYS, BY_OCCUPANCY, DECIDERS
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, StrategySpec, worker_side
from trtllm_disagg.tools.bench.strategies.records import Arm

#: Where a worker calls another one, it routes by cached prefixes.
_NEXT_ROUTER = (flag_of("next_router"), "kv")


def arms_at(workers: int, gpus_per_worker: int = 1) -> tuple[Arm, ...]:
    """All arms of `workers` workers. Raises ConfigError for fewer than two."""
    if workers < 2:
        raise ConfigError.bad_value("--workers", workers, "at least 2: a prefill and a decode worker")
    gpus = workers * gpus_per_worker
    return tuple(arm for spec in STRATEGIES.values() for arm in _arms_of(spec, workers, gpus))


def _arms_of(spec: StrategySpec, workers: int, gpus: int) -> Iterator[Arm]:
    if not spec.is_disaggregated:
        yield Arm(f"{workers} {spec.name}", spec.name, agg_workers=workers, gpus=gpus)
        return
    for prefill in range(1, workers):
        decode = workers - prefill
        for decider in _deciders_of(spec):
            name = f"{prefill}P{decode}D {spec.name}" + ("" if decider == ALWAYS else f" {decider}")
            chosen = () if decider == ALWAYS else (flag_of("prefill_decider"), decider)
            flags = (*_NEXT_ROUTER, *chosen) if spec.name in worker_side() else ()
            yield Arm(name, spec.name, 0, prefill, decode, gpus, decider, flags)


def _deciders_of(spec: StrategySpec) -> Iterator[str]:
    """The deciders that suit the strategy. One by occupancy needs a first stage that decides by it; `auto` has both."""
    if spec.name not in worker_side():
        yield ALWAYS
        return
    for decider in DECIDERS:
        roles = BY_OCCUPANCY.get(decider, spec.roles)
        if spec.entry_role in roles or not spec.is_order:
            yield decider


#: Without --arms: every strategy; deciders only when asked for.
DEFAULT_PATTERNS = ("* agg", *(f"*D {name}" for name, spec in STRATEGIES.items() if spec.is_disaggregated))

#: With --quick: no router, and no order for each request.
QUICK_PATTERNS = ("* agg", "*D prefill_first", "*D decode_first")


def choose(arms: Sequence[Arm], patterns: Iterable[str]) -> tuple[Arm, ...]:
    """The arms with a name that fits one of the patterns. Raises ConfigError for a pattern that fits none."""
    chosen: dict[str, Arm] = {}
    for pattern in patterns:
        fitting = {arm.name: arm for arm in arms if fnmatchcase(arm.name, pattern)}
        if not fitting:
            raise ConfigError.bad_value(
                "--arms", pattern, f"a pattern for some of: {', '.join(a.name for a in arms)}"
            )
        chosen |= fitting
    return tuple(arm for arm in arms if arm.name in chosen)


def arms_for(args: argparse.Namespace, gpus_per_worker: int = 1) -> tuple[Arm, ...]:
    default = QUICK_PATTERNS if args.quick else DEFAULT_PATTERNS
    patterns = args.arms.split(",") if args.arms else default
    return tuple(
        arm for count in worker_counts(args) for arm in choose(arms_at(count, gpus_per_worker), patterns)
    )


def worker_counts(args: argparse.Namespace) -> list[int]:
    return [int(count) for count in (args.workers or ("2" if args.quick else "2,4")).split(",")]


def workers_of(name: str) -> int:
    """The number of workers of an arm by its name, as "2 agg" or "1P3D router"."""
    layout = name.partition(" ")[0].rstrip("D")
    numbers = layout.split("P")
    if not all(number.isdigit() for number in numbers):
        raise ConfigError.bad_value("--url", name, "ARM=URL, with an arm as '2 agg' or '1P3D router'")
    return sum(map(int, numbers))
