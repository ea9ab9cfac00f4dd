"""Starts or resumes a run as the flags say. All settings are checked before anything is started.

The planned rates come from a simulation. If an arm does better or worse than simulated, the comparison ends in a doubt
that names the missing rate, and the run goes on with that rate.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from types import MappingProxyType
from urllib.parse import urlsplit

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.exit_codes import ExitCode
from trtllm_disagg.processes.steadily import without_silence
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.bench.http_client import Connection, completion_request
from trtllm_disagg.tools.bench.models import vocab_size
from trtllm_disagg.tools.bench.strategies.aiperf import AIPerf
from trtllm_disagg.tools.bench.strategies.arms import arms_at, arms_for, workers_of
from trtllm_disagg.tools.bench.strategies.measuring import Target
from trtllm_disagg.tools.bench.strategies.planning import (
    Engines,
    make_plan,
    plan_of_real,
    slo_of,
    traffics,
)
from trtllm_disagg.tools.bench.strategies.records import (
    NOMINAL,
    Arm,
    Plan,
    Point,
    PointResult,
    RunDirectory,
    Sensitivity,
    Software,
)
from trtllm_disagg.tools.bench.strategies.running import Deployments, Runner, Urls, duration
from trtllm_disagg.tools.bench.strategies.simulation import ArmSimulations, ModelledWorker
from trtllm_disagg.tools.bench.strategies.sweep import Sweep, WantedRate, shown, sweeps_of
from trtllm_disagg.tools.bench.strategies.verdict import Measure, goodput, judge
from trtllm_disagg.tools.bench.strategies.workloads import Ask, Shape, Traffic
from trtllm_disagg.tools.up.lifecycle import Interrupts
from trtllm_disagg.tools.up.up_command import default_name

_LONGEST_AT_URL = 1 << 17
_QUICK_SECONDS, _LONG_SECONDS = 600, 86400
_LONG_ANSWER, _FEW_PIECES = 1000, '{"stream_interval": 8192}'
_SHORTER = "--quick, --workloads, --workers 2, --arms, --repetitions 1 or --band 0; cut off, it goes on later"

#: Requests of each workload for the calibration; the first ones only warm up.
WARM_UP, REQUESTS = 2, 6
#: Tokens of an answer in the calibration: enough for a handoff and some steps.
TOKENS = 24

#: As factors of the plan's highest and lowest rate. Beyond them the simulation is wrong, not the choice of rates.
_HIGHEST, _LOWEST = 2.5, 0.2


def arm_to_calibrate_on(plan: Plan) -> Arm:
    """An arm with two stages if there is one, since it has more software than agg."""
    orders = (arm for arm in plan.arms if spec_of(arm.strategy).is_worker_side)
    return next(orders, plan.arms[0])


async def calibrate(
    target: Target,
    arm: Arm,
    workers: Mapping[str, ModelledWorker],
    traffics: Mapping[str, Traffic],
    vocabulary: int,
) -> dict[str, Software]:
    """What our own software adds, by workload, measured on a deployment with a clock as fast as the wall's."""
    prefill = workers["agg" if arm.agg_workers else "prefill"]
    decode = workers["agg" if arm.agg_workers else "decode"]
    found = {}
    for name, traffic in traffics.items():
        asks = traffic.asks(1.0, WARM_UP + REQUESTS, "calibration", vocabulary)
        added = [await _added_seconds(target, ask, prefill, decode, arm) for ask in asks]
        firsts, rests = zip(*added[WARM_UP:], strict=True)
        found[name] = Software(max(0.0, mean(firsts)) * 1000, max(0.0, mean(rests)) * 1000)
    return found


async def _added_seconds(
    target: Target, ask: Ask, prefill: ModelledWorker, decode: ModelledWorker, arm: Arm
) -> tuple[float, float]:
    """Seconds that no modelled GPU or link took: before the first token, and after it."""
    place = urlsplit(target.url)
    connection = await Connection.open(place.hostname or "127.0.0.1", place.port or 80)
    try:
        answer = await connection.ask(completion_request(target.model, ask.prompt, TOKENS))
    finally:
        connection.close()
    answer.events()
    whole, alone = Shape(len(ask.prompt), TOKENS), Shape(len(ask.prompt), 1)
    first = prefill.prefill_seconds(whole)
    rest = decode.isolated_seconds(whole) - decode.isolated_seconds(alone)
    moving = 0.0 if arm.agg_workers else prefill.sending_seconds(whole)
    first_seen, rest_seen = answer.first - answer.asked, answer.ended - answer.first
    if arm.waits_for_decode:
        first, moving = first + moving, 0.0
    return first_seen - first, rest_seen - rest - moving


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that are wrong or do not go together."""
    if not 0 <= args.band < 1:
        raise ConfigError.bad_value("--band", args.band, "a share from 0 to less than 1")
    if args.time_scale is not None and not 0.1 <= args.time_scale <= 1000:
        raise ConfigError.bad_value("--time-scale", args.time_scale, "a number from 0.1 to 1000")
    for key, text, kind, least, most in (
        ("--rates", args.rates, float, 0.001, 100_000),
        ("--workers", args.workers, int, 1, 1000),
    ):
        numbers = text.split(",") if text else []
        for number in numbers:
            if not _is_between(number, kind, least, most):
                allowed = f"numbers from {least:g} to {most:g} with commas between them"
                raise ConfigError.bad_value(key, number, allowed)
        if len(set(map(kind, numbers))) < len(numbers):
            raise ConfigError.bad_value(key, text, "each number once")
    if args.model is None or not (args.model / "config.json").is_file():
        raise ConfigError.bad_value(
            "--model", args.model and str(args.model), "a directory with a tokenizer and a config.json"
        )
    if args.url or args.engine != "modelled":
        _check_real(args)


def _check_real(args: argparse.Namespace) -> None:
    clock = args.time_scale
    for is_wrong, flag, value, allowed in (
        (args.foresee, "--foresee", None, "modelled GPUs: there are no tables of others"),
        (not args.rates, "--rates", None, "rates: without the tables of a modelled engine none are known"),
        (args.fills_gpus, "--requests", args.requests, "a number: what fills GPUs is known of modelled ones"),
        (clock not in (None, 1), "--time-scale", clock, "1: a real deployment's clock is the wall's"),
    ):
        if is_wrong:
            raise ConfigError.bad_value(flag, value, allowed)


def _is_between(text: str, kind: type[float] | type[int], least: float, most: float) -> bool:
    try:
        return least <= kind(text) <= most
    except ValueError:
        return False


def runner_of_engines(
    args: argparse.Namespace,
    aiperf: AIPerf,
    directory: RunDirectory,
    software: Mapping[str, Software] = MappingProxyType({}),
) -> Runner:
    engines = _engines(args)
    chosen = traffics(args, engines.longest)
    plan = (
        make_plan(args, engines, chosen, software)
        if engines.is_modelled
        else plan_of_real(args, arms_for(args, engines.gpus_per_worker), chosen, engines)
    )
    targets = Deployments(plan, engines, directory, tuple(args.worker_args))
    return _runner(args, plan, directory, chosen, targets, aiperf)


def _engines(args: argparse.Namespace) -> Engines:
    arms = arms_for(args)
    return Engines.read(args.engine, args.model, args.engine_configs, arms, args.override_engine_args)


def runner_of_urls(args: argparse.Namespace, aiperf: AIPerf, directory: RunDirectory) -> Runner:
    urls = dict(text.partition("=")[::2] for text in args.url)
    if len(urls) < len(args.url):
        raise ConfigError.bad_value("--url", ", ".join(args.url), "each arm once")
    counts = sorted({workers_of(name) for name in urls})
    known = {arm.name: arm for count in counts for arm in arms_at(count, args.gpus_per_worker or 1)}
    for name, url in urls.items():
        if name not in known or not url.startswith(("http://", "https://")):
            raise ConfigError.bad_value(
                "--url", f"{name}={url}", "ARM=http://..., as '1P1D decode_first=http://...'"
            )
    chosen = traffics(args, _LONGEST_AT_URL)
    plan = plan_of_real(args, tuple(known[name] for name in urls), chosen, None)
    targets = Urls(urls, default_name(str(args.model)))
    return _runner(args, plan, directory, chosen, targets, aiperf)


def _resumed(plan: Plan, directory: RunDirectory) -> Plan:
    """The plan of the run in `directory`, or `plan` if there is none. Raises ConfigError for other settings."""
    if not directory.has_plan:
        directory.save_plan(plan)
        return plan
    there = directory.plan()
    different = sorted(
        name
        # Only settings that both plans have: an older version recorded fewer.
        for name in there.settings.keys() & plan.settings.keys()
        if there.settings[name] != plan.settings[name]
    )
    if different or there.points != plan.points:
        differ = ", ".join(different) or "points"
        allowed = f"a new directory, or the settings of the run that is there; {differ} differ"
        raise ConfigError.bad_value("--out", str(directory.path), allowed)
    return there


def _runner(
    args: argparse.Namespace,
    plan: Plan,
    directory: RunDirectory,
    chosen: Mapping[str, Traffic],
    targets: Deployments | Urls,
    aiperf: AIPerf,
) -> Runner:
    vocabulary, plan = vocab_size(args.model), _resumed(plan, directory)
    return Runner(plan, directory, chosen, targets, aiperf, vocabulary, is_quick=args.quick)


async def measure_all(
    args: argparse.Namespace, aiperf: AIPerf, directory: RunDirectory, say: Callable[[str], None]
) -> ExitCode:
    """The exit status: 0 if all points are measured; 130 if interrupted, after all processes have ended."""

    async def work() -> None:
        software = {} if args.url else await _software(args, directory, say)
        with without_silence(say, "planning"):
            runner = (
                runner_of_urls(args, aiperf, directory)
                if args.url
                else runner_of_engines(args, aiperf, directory, software)
            )
            progress = runner.progress()
        seconds = math.ceil(progress.remaining_seconds())
        todo = f"{progress.total - progress.done} points in {len(progress.sending)} deployments"
        say(f"{todo}: about {duration(seconds)}{why_long(args, seconds, software, runner.plan)}")
        await runner.run(progress)
        while further := _further(args, runner, say):
            runner = runner.going_on_with(further)
            progress = runner.progress()
            say(f"{announcement(further)}: about {duration(math.ceil(progress.remaining_seconds()))}")
            await runner.run(progress)

    with Interrupts().listening() as interrupts:
        if await interrupts.allow(work()):
            return ExitCode.DONE
        say(f"interrupted; {_kept(directory)}, and the same command goes on from {directory.path}")
        return interrupts.exit_code


def _kept(directory: RunDirectory) -> str:
    """The points of a deployment are saved together, so those of the one that was interrupted are lost."""
    points = directory.plan().every_point if directory.has_plan else ()
    return (
        f"{sum(map(directory.has, points))} of {len(points)} points are kept" if points else "nothing is kept"
    )


def _further(args: argparse.Namespace, runner: Runner, say: Callable[[str], None]) -> tuple[Point, ...]:
    if not isinstance(runner.targets, Deployments):
        return ()
    engines, results = runner.targets.engines, runner.directory.results()
    with without_silence(say, "judging what was measured"):
        return further_points(args, engines, runner.traffics, runner.plan, results)


def further_points(
    args: argparse.Namespace,
    engines: Engines,
    traffics: Mapping[str, Traffic],
    plan: Plan,
    results: Iterable[PointResult],
) -> tuple[Point, ...]:
    """The points to measure beyond the plan's, all of which are measured, to decide the best goodput. Empty if the user
    chose the rates.
    """
    if args.rates or not plan.is_modelled:
        return ()
    measure, nominal = goodput(slo_of(args)), engines.workers()
    found: list[Point] = []
    for sweep in sweeps_of(plan, results):
        traffic = traffics[sweep.workload.name]
        for side, rate in _wanted(plan, sweep, measure):
            workers = {role: replace(worker, side=side) for role, worker in nominal.items()}
            simulations = ArmSimulations(sweep.arms, traffic, workers, args.fewest_requests, args.fills_gpus)
            found += map(simulations.planned, _points(plan, sweep, measure, side, rate))
    return tuple(found)


def _wanted(plan: Plan, sweep: Sweep, measure: Measure) -> list[tuple[Sensitivity, float]]:
    verdict = judge(sweep, measure)
    wanted = [lead.doubt.wanted for lead in verdict.doubtful if not verdict.refusal]
    rates = [(each.sensitivity, _measured_beyond(sweep, each) or each.requests_s) for each in wanted if each]
    return [(side, rate) for side, rate in dict.fromkeys(rates) if _is_near(plan, sweep, side, rate)]


def _measured_beyond(sweep: Sweep, wanted: WantedRate) -> float | None:
    """The next rate at which another arm was measured: arms are compared at rates that they share."""
    measured = {point.rate for point in sweep.measured if point.sensitivity == wanted.sensitivity}
    return min((rate for rate in measured if wanted.requests_s >= rate > wanted.beyond), default=None)


def _is_near(plan: Plan, sweep: Sweep, side: Sensitivity, rate: float) -> bool:
    planned = [each for arm in sweep.arms for each in _rates(plan.points, sweep, arm, side)]
    return _LOWEST * min(planned) <= rate <= _HIGHEST * max(planned)


def _points(plan: Plan, sweep: Sweep, measure: Measure, side: Sensitivity, rate: float) -> Iterator[Point]:
    """Points at `rate` for each arm that lacks it and that no lower rate has exhausted, with all repetitions."""
    for arm in sweep.arms:
        curves = sweep.curves(arm.name, side).values()
        highest = [curve[max(curve)] for curve in curves if max(curve) < rate]
        own = _rates(plan.every_point, sweep, arm, side)
        if rate not in own and not any(map(measure.is_exhausted, highest)):
            yield from (replace(point, rate=rate) for point in own[min(own)])


def _rates(points: Iterable[Point], sweep: Sweep, arm: Arm, side: Sensitivity) -> dict[float, list[Point]]:
    """The points of each rate, one for each repetition."""
    found: dict[float, list[Point]] = {}
    for point in points:
        if (point.arm, point.workload, point.sensitivity) == (arm.name, sweep.workload.name, side):
            found.setdefault(point.rate, []).append(point)
    return found


def announcement(points: Sequence[Point]) -> str:
    """ "2 more points, at 14.5 requests/s with decode steps x1.5"."""
    rates = dict.fromkeys(f"{point.rate:g} requests/s with {shown(point.sensitivity)}" for point in points)
    return f"the rates so far decide nothing: {len(points)} more points, at {', '.join(rates)}"


def why_long(args: argparse.Namespace, seconds: int, software: Mapping[str, Software], plan: Plan) -> str:
    """A clause that says why a run takes long and what makes it shorter; empty for a short one."""
    if not args.quick:
        return f"; shorter by {_SHORTER}" if seconds > _LONG_SECONDS else ""
    if seconds > _QUICK_SECONDS and args.time_scale is None and _relays_long_answers(plan):
        return f", since clients hear of each token; shorter by --override-engine-args '{_FEW_PIECES}'"
    most = max((each.first_token_ms for each in software.values()), default=0.0)
    if seconds <= _QUICK_SECONDS or not most:
        return ""
    return f", since this machine adds {most:.0f} ms to a first token; it takes less on one that does nothing else"


def _relays_long_answers(plan: Plan) -> bool:
    """Whether long answers are relayed token by token, which needs a slow clock."""
    has_long_ones = any(each.output_tokens >= _LONG_ANSWER for each in plan.workloads)
    has_parts = any('"stream_interval"' in engine for engine in plan.settings.values())
    return plan.is_modelled and has_long_ones and not has_parts


async def _software(
    args: argparse.Namespace, directory: RunDirectory, say: Callable[[str], None]
) -> Mapping[str, Software]:
    """What our own software adds: from the run's plan, or measured now; empty where it is not needed."""
    if directory.has_plan:
        return directory.plan().software
    if args.time_scale is not None or args.engine != "modelled":
        return {}
    engines = _engines(args)
    chosen = traffics(args, engines.longest)
    plan = make_plan(args, engines, chosen, {})
    arm = arm_to_calibrate_on(plan)
    say(f"{arm.name}: a few requests, for what our own software takes here")
    deployments = Deployments(plan, engines, directory, tuple(args.worker_args))
    async with deployments.serving((arm.name, NOMINAL, 1.0)) as target:
        return await calibrate(target, arm, engines.workers(), chosen, vocab_size(args.model))
