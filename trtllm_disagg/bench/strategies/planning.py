"""From the flags to a `Plan`: arms, workloads, how many times slower the clock runs, and the rates of each sweep."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from trtllm_disagg.bench.strategies.arms import DEFAULT_PATTERNS, arms_at, choose
from trtllm_disagg.bench.strategies.estimate import QUICK_SWEEP, SWEEP, Worker, capacity, rates
from trtllm_disagg.bench.strategies.records import NOMINAL, Arm, Plan, Point, Sensitivity
from trtllm_disagg.bench.strategies.workloads import BUILT_IN, Traffic, trace
from trtllm_disagg.deployment.up_command import default_name
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import WorkerRole, spec_of

#: What a first token costs our own software and the client, of which it is to be at most a twentieth.
_SOFTWARE_SECONDS, _SHARE = 0.02, 0.05
#: Answer tokens that a machine of two cores relays in a second, with time to spare.
_RELAYED = 1000
_LARGEST_SCALE = 256


@dataclass(frozen=True, slots=True)
class Engines:
    """What the workers of each role are started with."""

    engine: str
    model: Path
    arguments: Mapping[WorkerRole, dict[str, Any]]

    @classmethod
    def read(cls, engine: str, model: Path, directory: Path, arms: Sequence[Arm]) -> Engines:
        roles = dict.fromkeys(role for arm in arms for role in spec_of(arm.strategy).roles)
        missing = [f"{role}.yaml" for role in roles if not (directory / f"{role}.yaml").is_file()]
        if missing:
            raise ConfigError.bad_value(
                "--engine-configs", str(directory), f"a directory with {', '.join(missing)}"
            )
        files = {role: yaml.safe_load((directory / f"{role}.yaml").read_text()) or {} for role in roles}
        return cls(engine, model, files)

    @property
    def is_modelled(self) -> bool:
        return self.engine == "modelled"

    @property
    def gpus_per_worker(self) -> int:
        """Raises ConfigError when they differ: then the arms would not have the same number of GPUs."""
        counts = {role: int(given.get("tensor_parallel_size") or 1) for role, given in self.arguments.items()}
        if len(set(counts.values())) > 1:
            raise ConfigError.bad_value("--engine-configs", counts, "one tensor_parallel_size for all roles")
        return next(iter(counts.values()))

    @property
    def longest(self) -> int:
        """Tokens of the longest request that all roles take."""
        return min(int(given.get("max_seq_len") or 1 << 17) for given in self.arguments.values())

    def subject(self) -> str:
        own: dict[str, Any] = next(iter(self.arguments.values())).get("modelled") or {}
        gpus = self.gpus_per_worker
        on = f"{gpus} GPU{'s' * (gpus > 1)} a worker"
        if not self.is_modelled:
            return f"{default_name(str(self.model))} on {on}"
        if own.get("measured"):
            return f"{own.get('model') or default_name(str(self.model))} with step times of your own, {on}"
        return f"{own.get('model') or default_name(str(self.model))} on {own.get('system', 'h100_sxm')}, {on}"

    def workers(self) -> dict[str, Worker]:
        """As the tables have them, by role."""
        return {role: Worker.of({"model": str(self.model)} | given) for role, given in self.arguments.items()}

    def for_point(self, role: WorkerRole, sensitivity: Sensitivity, time_scale: float) -> dict[str, Any]:
        given = self.arguments[role]
        if not self.is_modelled:
            return given
        own = {
            "time_scale": time_scale,
            "prefill_factor": sensitivity.prefill_factor,
            "decode_factor": sensitivity.decode_factor,
        }
        return given | {"modelled": (given.get("modelled") or {}) | own}


def vocabulary_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def traffics(args: argparse.Namespace, longest: int) -> dict[str, Traffic]:
    """By name. Raises ConfigError for a name that is none."""
    known = BUILT_IN | ({"trace": trace(args.trace, longest)} if args.trace else {})
    default = ["rag"] if args.quick else list(known)
    names = args.workloads.split(",") if args.workloads else default
    for name in names:
        if name not in known:
            raise ConfigError.bad_value(
                "--workloads", name, f"one of {', '.join(known)}, or trace with --trace FILE"
            )
    return {name: known[name] for name in names}


def arms_for(args: argparse.Namespace, gpus_per_worker: int = 1) -> tuple[Arm, ...]:
    patterns = args.arms.split(",") if args.arms else DEFAULT_PATTERNS
    counts = map(int, (args.workers or ("2" if args.quick else "2,4")).split(","))
    return tuple(arm for count in counts for arm in choose(arms_at(count, gpus_per_worker), patterns))


def make_plan(
    args: argparse.Namespace, engines: Engines, chosen: Mapping[str, Traffic], command: str
) -> Plan:
    """Of modelled engines. Raises ConfigError, also for what no table covers."""
    arms = arms_for(args, engines.gpus_per_worker)
    nominal = engines.workers()
    points = []
    for sensitivity in sensitivities(args.band):
        # Rates of its own: with faster steps those of the tables would exhaust no arm, and prove nothing.
        workers = {role: replace(worker, factors=sensitivity) for role, worker in nominal.items()}
        for arm in arms:
            for name, traffic in chosen.items():
                equals = [each for each in arms if each.gpus == arm.gpus]
                able = {each.name: capacity(each, traffic.shape, workers) for each in equals}
                sweep = given_rates(args) or rates(able, QUICK_SWEEP if args.quick else SWEEP)[arm.name]
                scale = args.time_scale or scale_for(traffic, workers, max(able.values()))
                count = args.repetitions if sensitivity == NOMINAL else 1
                points += [
                    Point(arm.name, name, rate, repetition, sensitivity, scale)
                    for repetition in range(count)
                    for rate in sweep
                ]
    return Plan(
        subject=engines.subject(),
        arms=arms,
        workloads=tuple(traffic.record for traffic in chosen.values()),
        points=tuple(points),
        gpus_per_worker=engines.gpus_per_worker,
        command=command,
        settings=settings_of(args, engines),
    )


def given_rates(args: argparse.Namespace) -> tuple[float, ...]:
    return tuple(sorted(float(rate) for rate in args.rates.split(","))) if args.rates else ()


def sensitivities(band: float) -> tuple[Sensitivity, ...]:
    """The nominal one first, so that a run that is cut off has it."""
    if not band:
        return (NOMINAL,)
    less, more = 1 - band, 1 + band
    return (
        NOMINAL,
        *(Sensitivity(p, 1.0) for p in (less, more)),
        *(Sensitivity(1.0, d) for d in (less, more)),
    )


def scale_for(traffic: Traffic, workers: Mapping[str, Worker], most: float) -> float:
    """How many times slower the clock has to run for our own software to be a small share of what is measured: a power
    of two, so that workloads share deployments. `most`: requests a second of the best arm.
    """
    first_token = min(worker.prefill_seconds(traffic.shape) for worker in workers.values())
    wanted = max(_SOFTWARE_SECONDS / _SHARE / first_token, most * traffic.shape.output_tokens / _RELAYED)
    scale = 1
    while scale < min(wanted, _LARGEST_SCALE):
        scale *= 2
    return float(scale)


def settings_of(args: argparse.Namespace, engines: Engines | None) -> dict[str, str]:
    """All that makes another run of it."""
    flags = ("engine", "url", "workers", "arms", "workloads", "rates", "requests", "repetitions")
    told = {name: str(getattr(args, name)) for name in (*flags, "band", "time_scale", "quick")}
    told["worker_args"] = shlex.join(args.worker_args)
    files = engines.arguments if engines is not None else {}
    return told | {f"{role}.yaml": json.dumps(given) for role, given in files.items()}
