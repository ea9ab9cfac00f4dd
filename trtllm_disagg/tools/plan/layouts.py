"""Lists the layouts of a number of workers: roles, numbers and strategies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_disagg.config.deciders import ALWAYS, BY_OCCUPANCY, DECIDERS
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, StrategySpec, WorkerRole, spec_of


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers of one size under a strategy."""

    #: "1P3D decode_first", "4 agg", "2P2D auto length".
    name: str
    #: A key of `strategies.STRATEGIES`.
    strategy: str
    agg_workers: int = 0
    prefill_workers: int = 0
    decode_workers: int = 0
    #: Of all workers.
    gpus: int = 1
    decider: str = ALWAYS

    @property
    def workers(self) -> str:
        """The name without the strategy: "1P3D" or "4 agg"."""
        return self.name if self.agg_workers else self.name.partition(" ")[0]

    @property
    def gpus_per_worker(self) -> int:
        return self.gpus // (self.agg_workers + self.prefill_workers + self.decode_workers)

    def count(self, role: WorkerRole) -> int:
        return {"agg": self.agg_workers, "prefill": self.prefill_workers, "decode": self.decode_workers}[role]


def layouts_of(workers: int, gpus_per_worker: int = 1) -> tuple[Layout, ...]:
    """All layouts of `workers` workers; a single one is agg."""
    gpus = workers * gpus_per_worker
    return tuple(layout for spec in STRATEGIES.values() for layout in _layouts_under(spec, workers, gpus))


def _layouts_under(spec: StrategySpec, workers: int, gpus: int) -> Iterator[Layout]:
    if not spec.is_disaggregated:
        yield Layout(f"{workers} {spec.name}", spec.name, agg_workers=workers, gpus=gpus)
        return
    for prefill in range(1, workers):
        decode = workers - prefill
        for decider in _deciders_of(spec):
            name = f"{prefill}P{decode}D {spec.name}" + ("" if decider == ALWAYS else f" {decider}")
            yield Layout(name, spec.name, 0, prefill, decode, gpus, decider)


def _deciders_of(spec: StrategySpec) -> Iterator[str]:
    """The deciders for a strategy. A decider by occupancy needs a first stage of its role; `auto` has both."""
    if not spec.is_run_by_workers:
        yield ALWAYS
        return
    for decider in DECIDERS:
        roles = BY_OCCUPANCY.get(decider, spec.roles)
        if spec.entry_role in roles or spec.chooses_order:
            yield decider


def planned_layouts(workers: int, gpus_per_worker: int = 1) -> tuple[Layout, ...]:
    """The layouts that `plan` simulates: each strategy with its decider `planned_with`."""
    layouts = layouts_of(workers, gpus_per_worker)
    return tuple(each for each in layouts if each.decider == spec_of(each.strategy).planned_with)


def worker_counts(text: str, flag: str = "--workers", least: int = 2) -> list[int]:
    """Parses a flag such as "2,4". Raises ConfigError."""
    numbers = text.split(",")
    for number in numbers:
        if not number.isdecimal() or not least <= int(number) <= 1000:
            raise ConfigError.bad_value(flag, number, f"numbers from {least} to 1000, with commas")
    return list(dict.fromkeys(map(int, numbers)))
