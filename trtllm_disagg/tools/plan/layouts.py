"""The layouts of a number of workers: how many do both phases, or prefill and decode, and under which strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trtllm_disagg.config.deciders import ALWAYS, BY_OCCUPANCY, DECIDERS
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, StrategySpec, WorkerRole, worker_side

#: Where a worker calls another one, it routes by cached prefixes.
_NEXT_ROUTER = (flag_of("next_router"), "kv")


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers of the same size under a strategy."""

    #: "1P3D decode_first", "4 agg", "2P2D auto length".
    name: str
    #: A name of `strategies.STRATEGIES`.
    strategy: str
    agg_workers: int = 0
    prefill_workers: int = 0
    decode_workers: int = 0
    #: GPUs of all workers together.
    gpus: int = 1
    #: More flags of every worker.
    flags: tuple[str, ...] = ()
    decider: str = ALWAYS

    @property
    def workers(self) -> str:
        """The name without the strategy, as "1P3D" or "4 agg"."""
        return self.name if self.agg_workers else self.name.partition(" ")[0]

    def count(self, role: WorkerRole) -> int:
        return {"agg": self.agg_workers, "prefill": self.prefill_workers, "decode": self.decode_workers}[role]


def layouts_of(workers: int, gpus_per_worker: int = 1) -> tuple[Layout, ...]:
    """All layouts of `workers` workers. Raises ConfigError for fewer than two."""
    if workers < 2:
        raise ConfigError.bad_value("--workers", workers, "at least 2: a prefill and a decode worker")
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
            chosen = () if decider == ALWAYS else (flag_of("prefill_decider"), decider)
            flags = (*_NEXT_ROUTER, *chosen) if spec.name in worker_side() else ()
            yield Layout(name, spec.name, 0, prefill, decode, gpus, flags, decider)


def _deciders_of(spec: StrategySpec) -> Iterator[str]:
    """The deciders that suit the strategy. One by occupancy needs a first stage that decides by it; `auto` has both."""
    if spec.name not in worker_side():
        yield ALWAYS
        return
    for decider in DECIDERS:
        roles = BY_OCCUPANCY.get(decider, spec.roles)
        if spec.entry_role in roles or not spec.is_order:
            yield decider


#: What `plan` simulates: the layouts of agg, and each order that chooses by other things than software.
PLANNED = ("* agg", "*D prefill_first", "*D decode_first length", "*D auto")
#: Without --layouts: every order, agg and the frontend's own chain; deciders only when asked for.
DEFAULT_PATTERNS = ("* agg", *(f"*D {name}" for name, spec in STRATEGIES.items() if spec.is_disaggregated))


def chosen_layouts(
    layouts: Sequence[Layout], patterns: Iterable[str] = DEFAULT_PATTERNS
) -> tuple[Layout, ...]:
    """The layouts with a name that fits one of the patterns. Raises ConfigError for a pattern that fits none."""
    chosen: dict[str, Layout] = {}
    for pattern in patterns:
        fitting = {layout.name: layout for layout in layouts if fnmatchcase(layout.name, pattern)}
        if not fitting:
            names = ", ".join(layout.name for layout in layouts)
            raise ConfigError.bad_value("--layouts", pattern, f"a pattern for some of: {names}")
        chosen |= fitting
    return tuple(layout for layout in layouts if layout.name in chosen)


DEFAULT_WORKERS = "2,4"


def worker_counts(text: str) -> list[int]:
    """The value of --workers, as "2,4". Raises ConfigError."""
    counts = []
    for number in text.split(","):
        if not number.isdecimal() or not 2 <= int(number) <= 1000:
            raise ConfigError.bad_value(
                "--workers", number, "numbers from 2 to 1000 with commas between them"
            )
        counts.append(int(number))
    return list(dict.fromkeys(counts))
