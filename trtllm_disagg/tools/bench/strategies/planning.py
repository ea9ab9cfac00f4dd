"""Makes a `Plan` from the flags: arms, workloads, time scales, and the rates of each sweep. Rates are in requests a
second, and follow from the arms' simulated knees (simulation.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from trtllm_disagg.config.engine_args import merged_args, override_of
from trtllm_disagg.config.yaml_file import read_mapping
from trtllm_disagg.engines.modelled.config import checked
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import WorkerRole, spec_of
from trtllm_disagg.tools.bench.figures import rounded
from trtllm_disagg.tools.bench.strategies.arms import arms_for
from trtllm_disagg.tools.bench.strategies.measures import DEFAULT_SLO, Slo
from trtllm_disagg.tools.bench.strategies.records import (
    NOMINAL,
    Arm,
    Plan,
    Point,
    Sensitivity,
    Software,
    gpu_count,
)
from trtllm_disagg.tools.bench.strategies.simulation import ArmSimulations, ModelledWorker, capacity
from trtllm_disagg.tools.bench.strategies.workloads import BUILT_IN, Traffic, trace
from trtllm_disagg.tools.up.gpus import PARALLEL_SIZES, num_ranks
from trtllm_disagg.tools.up.up_command import default_name

#: What our own software adds, where it was not measured.
ASSUMED = Software(first_token_ms=20.0)
#: Largest share of any measured time that our own software may take when the clock speed is planned;
#: `sweep.MOST_SOFTWARE` is the limit applied afterwards.
_PLANNED_SOFTWARE = 0.04
#: What a machine of two cores easily does in a second: pieces of answers relayed, and tokens of modelled engines.
_RELAYED_PIECES, _MODELLED_TOKENS = 1000, 25_000
#: A limit for requests and KV leases that is longer than any of them takes.
LONGEST_WAIT_SECONDS = 3600
#: Planned wall seconds of drain at a real deployment, where it cannot be estimated.
_REAL_DRAIN_SECONDS = 15.0
#: Most wall seconds of an answer in a quick run. If TTFT needs a slower clock, the clock is as slow as the SLO needs,
#: and no conclusion is drawn from TTFT itself.
_QUICK_ANSWER_SECONDS = 20.0
#: The time scales to choose from: few, so that workloads with similar needs share a deployment.
_SCALES = tuple(sorted(2.0**power * step for power in range(-2, 8) for step in (1, 1.5)))

#: As shares of the best arm's knee.
_SWEEP = (0.15, 0.35, 0.55, 0.75, 0.9, 1.05, 1.25)
#: In a quick run, as shares of a knee: a calm rate; one below the knee by as much as the simulation may be wrong; and
#: one above it.
_CALM, _BELOW, _ABOVE = 0.5, 0.85, 1.3
#: On a side of the band, around the knees of arms that are near each other. A rate above the knees alone would compare
#: small numbers: next to nothing is in time there.
_JUST_BELOW, _JUST_ABOVE = 0.9, 1.1
#: Arms with knees that differ by a smaller factor are near each other: one rate is below all knees.
_NEAR = 1.3
#: A real knee may be so many times the simulated one: where prompts share prefixes and lengths vary, an arm had all
#: answers in time above it.
_MOST_ERROR = 1.5


@dataclass(frozen=True, slots=True)
class Engines:
    """What the workers of each role are started with."""

    engine: str
    model: Path
    arguments: Mapping[WorkerRole, dict[str, Any]]

    @classmethod
    def read(
        cls, engine: str, model: Path, directory: Path, arms: Sequence[Arm], override: str = ""
    ) -> Engines:
        """`override`: JSON over the files of all roles, as a worker's --override-engine-args."""
        roles = dict.fromkeys(role for arm in arms for role in spec_of(arm.strategy).roles)
        missing = [f"{role}.yaml" for role in roles if not (directory / f"{role}.yaml").is_file()]
        if missing:
            raise ConfigError.bad_value(
                "--engine-configs", str(directory), f"a directory with {', '.join(missing)}"
            )
        files = {role: read_mapping(directory / f"{role}.yaml", "--engine-configs") for role in roles}
        own = override_of(override, is_strict=False)
        merged = {role: merged_args(given, own) for role, given in files.items()}
        if engine == "modelled":
            for given in merged.values():
                checked(given.get("modelled") or {})
        return cls(engine, model, merged)

    @property
    def is_modelled(self) -> bool:
        return self.engine == "modelled"

    @property
    def gpus_per_worker(self) -> int:
        """Raises ConfigError if the roles differ: the arms would not have the same number of GPUs."""
        counts = {role: num_ranks(given) for role, given in self.arguments.items()}
        if len(set(counts.values())) > 1:
            raise ConfigError.bad_value(
                "--engine-configs", counts, f"one {' x '.join(PARALLEL_SIZES)} for all roles"
            )
        return next(iter(counts.values()))

    @property
    def longest(self) -> int:
        """Tokens of the longest request that every role accepts."""
        return min(int(given.get("max_seq_len") or 1 << 17) for given in self.arguments.values())

    def subject(self) -> str:
        own: dict[str, Any] = next(iter(self.arguments.values())).get("modelled") or {}
        on = f"{gpu_count(self.gpus_per_worker)} a worker"
        if not self.is_modelled:
            return f"{default_name(str(self.model))} on {on}"
        if own.get("measured"):
            return f"{own.get('model') or default_name(str(self.model))} with step times of your own, {on}"
        return f"{own.get('model') or default_name(str(self.model))} on {own.get('system', 'h100_sxm')}, {on}"

    def workers(self) -> dict[str, ModelledWorker]:
        """The modelled workers by role, without factors."""
        return {
            role: ModelledWorker.of({"model": str(self.model)} | given)
            for role, given in self.arguments.items()
        }

    def for_point(self, role: WorkerRole, factors_file: Path, time_scale: float) -> dict[str, Any]:
        given = self.arguments[role]
        if not self.is_modelled:
            return given
        own = {"time_scale": time_scale, "factors_file": str(factors_file)}
        given = given | {"modelled": (given.get("modelled") or {}) | own}
        if transceiver := given.get("cache_transceiver_config"):
            waits = {"kv_transfer_timeout_ms": 1000 * LONGEST_WAIT_SECONDS}
            given["cache_transceiver_config"] = transceiver | waits
        return given


def traffics(args: argparse.Namespace, longest: int) -> dict[str, Traffic]:
    """The chosen workloads by name. Raises ConfigError for an unknown name."""
    known = BUILT_IN | ({"trace": trace(args.trace, longest)} if args.trace else {})
    default = ["rag"] if args.quick else list(known)
    names = args.workloads.split(",") if args.workloads else default
    for name in names:
        if name not in known:
            raise ConfigError.bad_value(
                "--workloads", name, f"one of {', '.join(known)}, or trace with --trace FILE"
            )
        if (own := known[name].longest) > longest:
            allowed = f"requests of at most {longest} tokens, the engine's max_seq_len; this one has {own}"
            raise ConfigError.bad_value("--workloads", name, allowed)
    return {name: known[name] for name in names}


def make_plan(
    args: argparse.Namespace,
    engines: Engines,
    chosen: Mapping[str, Traffic],
    software: Mapping[str, Software],
) -> Plan:
    """The plan of a run on modelled engines. Raises ConfigError, also for what no table covers."""
    arms = arms_for(args, engines.gpus_per_worker)
    nominal = engines.workers()
    equals = {gpus: [arm for arm in arms if arm.gpus == gpus] for gpus in dict.fromkeys(a.gpus for a in arms)}
    # Each side has rates of its own: with faster steps, the nominal rates would exhaust no arm and prove nothing.
    workers = {
        side: {role: replace(worker, side=side) for role, worker in nominal.items()}
        for side in sensitivities(args.band)
    }

    def simulations_of(side: Sensitivity, gpus: int, name: str) -> ArmSimulations:
        return ArmSimulations(
            equals[gpus], chosen[name], workers[side], args.fewest_requests, args.fills_gpus
        )

    simulated = {key: simulations_of(*key) for key in product(workers, equals, chosen)}
    rates = {key: _rates_by_arm(args, simulations, key[0]) for key, simulations in simulated.items()}

    def scale(side: Sensitivity, gpus: int, name: str) -> float:
        if args.time_scale:
            return _of_side(float(args.time_scale), side)
        # A quick run has one clock speed. At its rates requests wait for prefill, which makes TTFT long.
        sides, speeds, slo = (
            (workers, nominal, slo_of(args)) if args.quick else ((side,), workers[side], None)
        )
        most = max(capacity(arm, chosen[name].shape, speeds) for arm in equals[gpus])
        requests = max(
            simulated[each, gpus, name].requests(rate)
            for each in sides
            for of_arm in rates[each, gpus, name].values()
            for rate in of_arm
        )
        own = software.get(name, ASSUMED)
        return _of_side(scale_for(chosen[name], speeds, most, requests, own, quick_slo=slo), side)

    scales = {key: scale(*key) for key in simulated}

    def points_of(side: Sensitivity, arm: Arm, name: str) -> Iterator[Point]:
        key = side, arm.gpus, name
        for repetition in range(args.repetitions if side == NOMINAL else 1):
            for rate in rates[key][arm.name]:
                yield simulated[key].planned(Point(arm.name, name, rate, repetition, side, scales[key]))

    points = tuple(point for key in product(workers, arms, chosen) for point in points_of(*key))
    return _plan_of(args, engines, chosen, arms, points, software=dict(software))


def plan_of_real(
    args: argparse.Namespace, arms: tuple[Arm, ...], chosen: Mapping[str, Traffic], engines: Engines | None
) -> Plan:
    """A plan for real engines: with the given rates, in wall time, without a sensitivity band. `engines`: None behind
    URLs.
    """
    points = tuple(
        Point(
            arm.name,
            name,
            rate,
            repetition,
            requests=traffic.at_least(args.requests),
            drain_s=_REAL_DRAIN_SECONDS,
        )
        for arm in arms
        for name, traffic in chosen.items()
        for repetition in range(args.repetitions)
        for rate in _given_rates(args)
    )
    return _plan_of(args, engines, chosen, arms, points, is_modelled=False)


def _plan_of(
    args: argparse.Namespace,
    engines: Engines | None,
    chosen: Mapping[str, Traffic],
    arms: tuple[Arm, ...],
    points: tuple[Point, ...],
    **more: Any,
) -> Plan:
    return Plan(
        subject=engines.subject() if engines else default_name(str(args.model)),
        arms=arms,
        workloads=tuple(traffic.record for traffic in chosen.values()),
        points=points,
        gpus_per_worker=engines.gpus_per_worker if engines else args.gpus_per_worker or 1,
        command=shlex.join(["trtllm-disagg", *sys.argv[1:]]),
        settings=_settings_of(args, engines),
        **more,
    )


def _rates_by_arm(
    args: argparse.Namespace, simulations: ArmSimulations, side: Sensitivity
) -> dict[str, tuple[float, ...]]:
    """The same rates for all arms; for each arm they end with the first that is surely above its knee."""
    if given := _given_rates(args):
        return {arm.name: given for arm in simulations.arms}
    knees = {arm.name: simulations.knee(arm, slo_of(args)) for arm in simulations.arms}
    if not args.quick:
        common = full_sweep(knees)
    elif side == NOMINAL:
        common = quick_sweep(knees)
    else:
        common = deciding(knees)
    return {arm: up_to_the_first_above(own, common) for arm, own in knees.items()}


def full_sweep(knees: Mapping[str, float]) -> tuple[float, ...]:
    return _rounded(share * max(knees.values()) for share in _SWEEP)


def quick_sweep(knees: Mapping[str, float]) -> tuple[float, ...]:
    low, high = min(knees.values()), max(knees.values())
    lowest = _CALM * high if high < _NEAR * low else _BELOW * low
    return _rounded((lowest, _BELOW * high, _ABOVE * high))


def deciding(knees: Mapping[str, float]) -> tuple[float, ...]:
    """The rates for a side of the band: one that only the best arm should sustain; or, if arms are near each other, one
    that all should sustain and one that none should.
    """
    low, high = min(knees.values()), max(knees.values())
    return _rounded((_JUST_BELOW * low, _JUST_ABOVE * high) if high < _NEAR * low else (_BELOW * high,))


def _rounded(rates: Iterable[float]) -> tuple[float, ...]:
    return tuple(rounded(rate, 2) for rate in rates)


def up_to_the_first_above(knee: float, common: tuple[float, ...]) -> tuple[float, ...]:
    """The sorted `common` rates up to and including the first that is surely above the arm's knee."""
    return common[: sum(rate <= _MOST_ERROR * knee for rate in common) + 1]


def slo_of(args: argparse.Namespace) -> Slo:
    """Raises ConfigError."""
    return Slo.parse(args.slo) if args.slo else DEFAULT_SLO


def _given_rates(args: argparse.Namespace) -> tuple[float, ...]:
    return tuple(sorted(float(rate) for rate in args.rates.split(","))) if args.rates else ()


def sensitivities(band: float) -> tuple[Sensitivity, ...]:
    """The nominal side first, so that an interrupted run has it."""
    if not band:
        return (NOMINAL,)
    less, more = 1 - band, 1 + band
    return (
        NOMINAL,
        *(Sensitivity(p, 1.0) for p in (less, more)),
        *(Sensitivity(1.0, d) for d in (less, more)),
    )


def _of_side(scale: float, side: Sensitivity) -> float:
    """Slows a clock that is faster than the wall's, up to the wall's, by as much as this side shortens decode steps:
    this machine has no time to spare then.
    """
    return max(scale, min(1.0, scale / side.decode_factor))


def scale_for(
    traffic: Traffic,
    workers: Mapping[str, ModelledWorker],
    most: float,
    requests: int,
    software: Software,
    quick_slo: Slo | None = None,
) -> float:
    """How many times slower the clock has to run for our own software to be a small share of each measured time; if a
    quick run would then take too long, a small share of what `quick_slo` allows. Only in the second case may the clock
    be faster than the wall's. `most`: requests a second of the best arm; `requests`: of a point.
    """
    shape, fastest = traffic.shape, 1.0
    first_token = min(worker.prefill_seconds(shape) for worker in workers.values())
    alone = min(worker.isolated_seconds(shape) for worker in workers.values())
    first_scale = software.first_token_ms / 1000 / _PLANNED_SOFTWARE / first_token
    if quick_slo is not None and first_scale * alone > _QUICK_ANSWER_SECONDS:
        limit, fastest = quick_slo.ttft or quick_slo.latency or math.inf, _SCALES[0]
        first_scale = max(
            software.first_token_ms / _PLANNED_SOFTWARE / limit,
            software.first_token_ms / 1000 / _PLANNED_SOFTWARE / alone,
        )
    answers = min(most, requests / alone)
    wanted = max(
        fastest,
        first_scale,
        software.rest_ms / 1000 / _PLANNED_SOFTWARE / (alone - first_token),
        answers * _num_pieces(shape.output_tokens, workers) / _RELAYED_PIECES,
        answers * shape.output_tokens / _MODELLED_TOKENS,
    )
    return next((scale for scale in _SCALES if scale >= wanted), _SCALES[-1])


def _num_pieces(tokens: float, workers: Mapping[str, ModelledWorker]) -> float:
    """The pieces in which a client gets an answer: at least the first token and the end."""
    return max(tokens / min(worker.stream_interval for worker in workers.values()), min(tokens, 2.0))


def _settings_of(args: argparse.Namespace, engines: Engines | None) -> dict[str, str]:
    """All settings that tell one run from another."""
    flags = ("engine", "url", "workers", "arms", "workloads", "rates", "requests", "repetitions")
    told = {name: str(getattr(args, name)) for name in (*flags, "band", "time_scale", "quick")}
    told["worker_args"] = shlex.join(args.worker_args)
    if args.url:
        told["gpus_per_worker"] = str(args.gpus_per_worker or 1)
    # Files are compared by content: they may have moved.
    told["model"] = _fingerprint(args.model / "config.json")
    if args.trace:
        told["trace"] = _fingerprint(args.trace)
    files = engines.arguments if engines is not None else {}
    return told | {f"{role}.yaml": json.dumps(given) for role, given in files.items()}


def _fingerprint(file: Path) -> str:
    return f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
