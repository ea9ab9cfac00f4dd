"""A plan, point by point, until it is done or interrupted."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

import yaml

from trtllm_disagg.bench.machine import describe_machine
from trtllm_disagg.bench.strategies.aiperf import AIPerf, LoadFailedError
from trtllm_disagg.bench.strategies.measuring import (
    Elsewhere,
    Here,
    Schedule,
    Target,
    measure,
)
from trtllm_disagg.bench.strategies.planning import LONGEST_WAIT_SECONDS, Engines
from trtllm_disagg.bench.strategies.records import (
    NOMINAL,
    Plan,
    Point,
    PointResult,
    RunDirectory,
    Sensitivity,
)
from trtllm_disagg.bench.strategies.workloads import Ask, Traffic
from trtllm_disagg.config.thresholds import ADMISSION
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.deployment import DeploymentConfig, running_deployment
from trtllm_disagg.deployment.plan import Role
from trtllm_disagg.deployment.run_dir import scratch_directory
from trtllm_disagg.deployment.up_command import default_name
from trtllm_disagg.modelled.factors import Factors
from trtllm_disagg.processes.short_log import halves
from trtllm_disagg.strategies import spec_of

_PROGRESS_SECONDS = 5.0
#: Until the first deployment has shown how long it takes to start one, and the load generator.
_GUESSED_START = 60.0
#: Workers that are asked for more than they are able to do let it wait: a request that is refused, or done again where
#: its KV was given up, says nothing of how much too much it was. KV waits as long (planning.py).
_NO_BOUND = tuple(text for name in ADMISSION for text in (flag_of(name), "0"))
_DEADLINES = ("prefill_timeout", "first_decode_token_timeout", "next_decode_token_timeout")
_NO_DEADLINE = tuple(text for name in _DEADLINES for text in (flag_of(name), f"{LONGEST_WAIT_SECONDS:g}"))
_FACTORS = "factors.json"
_PACKAGES = ("trtllm-disagg", "ai-dynamo", "aiconfigurator-core", "tensorrt-llm")

#: What has to be started: an arm under one sensitivity, at one speed of the clock.
Key = tuple[str, Sensitivity, float]


def batches(points: Sequence[Point], is_quick: bool = False) -> Iterator[tuple[Key, list[Point]]]:
    """Points that one deployment serves, in the plan's order of their first ones; within each, every workload's rates
    rise. A quick run starts none anew for the sides of the band; a long one does, so that less is lost with one.
    """
    grouped: dict[Key, list[Point]] = {}
    for point in points:
        sensitivity = NOMINAL if is_quick else point.sensitivity
        grouped.setdefault((point.arm, sensitivity, point.time_scale), []).append(point)
    yield from grouped.items()


@dataclass(frozen=True, slots=True)
class Deployments:
    """Started here, one at a time."""

    plan: Plan
    engines: Engines
    directory: RunDirectory
    worker_args: tuple[str, ...] = ()

    @asynccontextmanager
    async def serving(self, key: Key) -> AsyncIterator[Target]:
        place = self._place(key)
        # A Unix socket's path has room for 107 bytes, and arms' names are long.
        with scratch_directory("trtllm-disagg-bench-") as scratch:
            config = replace(self.config(key), run_dir=scratch.path)
            try:
                async with running_deployment(config) as deployment:
                    yield Here(deployment, place / _FACTORS)
            finally:
                for log in scratch.path.glob("*.log"):
                    for half in halves(log):
                        shutil.copy(half, place)

    def _place(self, key: Key) -> Path:
        arm, sensitivity, scale = key
        name = Point(arm, "all", 0, 0, sensitivity, scale).file_name.removesuffix(".json")
        return self.directory.logs.absolute() / name

    def config(self, key: Key) -> DeploymentConfig:
        arm_name, sensitivity, scale = key
        arm = self.plan.arm(arm_name)
        place = self._place(key)
        place.mkdir(parents=True, exist_ok=True)
        Factors(sensitivity.prefill_factor, sensitivity.decode_factor).write(place / _FACTORS)
        configs: dict[Role, Path] = {}
        for role in spec_of(arm.strategy).roles:
            file = place / f"{role}.yaml"
            file.write_text(yaml.safe_dump(self.engines.for_point(role, place / _FACTORS, scale)))
            configs[role] = file
        calls = spec_of(arm.strategy).is_worker_side
        return DeploymentConfig(
            strategy=arm.strategy,
            model=str(self.engines.model),
            served_model_name=default_name(str(self.engines.model)),
            run_dir=place / "up",
            agg_workers=max(1, arm.agg_workers),
            prefill_workers=max(1, arm.prefill_workers),
            decode_workers=max(1, arm.decode_workers),
            http_port=0,
            engine=self.engines.engine,
            engine_configs=configs,
            # Requests that are cut off have no worth.
            drain_seconds=1.0,
            worker_args=(*(_NO_DEADLINE if calls else ()), *_NO_BOUND, *arm.flags, *self.worker_args),
        )


@dataclass(frozen=True, slots=True)
class Urls:
    """Of deployments that serve already, by arm."""

    urls: Mapping[str, str]
    model: str

    @asynccontextmanager
    async def serving(self, key: Key) -> AsyncIterator[Target]:
        yield Elsewhere(self.urls[key[0]], self.model)


def duration(seconds: int) -> str:
    """As exact as a plan is."""
    minutes, hours, days = seconds // 60, seconds // 3600, seconds / 86400
    if days >= 2:
        return f"{days:.0f} days"
    if hours >= 2:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {seconds % 60:02d} s"


@dataclass
class Progress:
    """A line every few seconds: what is measured, and the time that is left."""

    total: int
    out: TextIO = sys.stderr
    done: int = 0
    #: Wall seconds of sending, of each batch that has not begun.
    sending: list[float] = field(default_factory=list)
    #: What each batch took beside sending: starts, pauses and the last answers.
    took: list[float] = field(default_factory=list)
    what: str = ""
    clock: Callable[[], float] = time.monotonic
    #: By the clock, of the batch that has begun.
    _sent_at: float = 0.0

    def begin(self, what: str, sending: float) -> None:
        self.what, self._sent_at = what, self.clock() + sending

    def end(self, measured: int) -> None:
        """Of the batch that has begun. What it could not measure is a batch of its own."""
        self.done += measured
        self.took.append(max(0.0, self.clock() - self._sent_at))
        self._sent_at = 0.0

    def left(self) -> float:
        """A batch that takes longer than planned takes nothing from the others."""
        beside = sum(self.took) / len(self.took) if self.took else _GUESSED_START
        now = max(0.0, self._sent_at + beside - self.clock()) if self._sent_at else 0.0
        return now + sum(self.sending) + len(self.sending) * beside

    def say(self) -> None:
        seconds = round(self.left())
        left = f"about {duration(seconds)} left" if seconds else "longer than planned"
        print(f"[{self.done}/{self.total} points] {self.what}: {left}", file=self.out)

    async def keep_saying(self) -> None:
        while True:
            self.say()
            await asyncio.sleep(_PROGRESS_SECONDS)


@dataclass(frozen=True, slots=True)
class Runner:
    plan: Plan
    directory: RunDirectory
    traffics: Mapping[str, Traffic]
    targets: Deployments | Urls
    aiperf: AIPerf
    vocabulary: int
    is_quick: bool = False

    def groups(self) -> list[tuple[Key, list[Point]]]:
        """What is there already is not measured again."""
        missing = [point for point in self.plan.every_point if not self.directory.has(point)]
        return list(batches(missing, self.is_quick))

    def progress(self) -> Progress:
        """Its `left` is what the run is expected to take."""
        groups = self.groups()
        count = len(self.plan.every_point)
        progress = Progress(count, done=count - sum(len(points) for _, points in groups))
        progress.sending = [
            Schedule.of([(p, self._lengths(p)) for p in points]).seconds for _, points in groups
        ]
        return progress

    def going_on_with(self, further: Sequence[Point]) -> Runner:
        """The same run with more points, which are in its directory's plan too."""
        plan = replace(self.plan, further=(*self.plan.further, *further))
        self.directory.save_plan(plan)
        return replace(self, plan=plan)

    async def run(self, progress: Progress) -> None:
        groups = self.groups()
        saying = asyncio.create_task(progress.keep_saying(), name="progress")
        versions = versions_here() | {"aiperf": await asyncio.to_thread(self.aiperf.version)}
        try:
            for key, points in groups:
                del progress.sending[0]
                await self._batch(key, points, versions, progress)
        finally:
            saying.cancel()

    async def _batch(
        self, key: Key, points: list[Point], versions: Mapping[str, str], progress: Progress
    ) -> None:
        attempt, again = 1, ""
        while points:
            schedule = self._schedule(points, attempt)
            progress.begin(f"{key[0]}: starting{again}", schedule.seconds)
            async with self.targets.serving(key) as target:
                told = ", ".join(dict.fromkeys(point.workload for point in points))
                progress.what = f"{key[0]}: {len(points)} points, {told}{again}"
                results = await self._measure(schedule, target, versions)
            self._save(results)
            progress.end(len(results))
            saved = {result.point for result in results}
            points = [point for point in points if point not in saved]
            # Points met each other: longer pauses, and empty caches, since their prompts are the same again.
            attempt, again = attempt + 1, ", again with longer pauses"

    def _save(self, results: Sequence[PointResult]) -> None:
        """Raises LoadFailedError where a point has errors only: its deployment is gone, and the run may go on later."""
        dead = [each for each in results if each.requests and not each.answered]
        for result in results:
            if result not in dead:
                self.directory.save(result)
        if dead:
            point, errors = dead[0].point, {str(request.error) for request in dead[0].requests}
            raise LoadFailedError(
                f"{point.arm}: none of {len(dead[0].requests)} requests at {point.rate:g} requests/s was answered "
                f"({', '.join(sorted(errors))[:200]}); with the deployment back, the same command goes on"
            )

    async def _measure(
        self, schedule: Schedule, target: Target, versions: Mapping[str, str]
    ) -> list[PointResult]:
        place = self.directory.logs / "load" / schedule.stretches[0].point.file_name.removesuffix(".json")
        measured = await measure(schedule, target, self.aiperf, place.absolute())
        arms = {arm.name: arm for arm in self.plan.arms}
        return measured.results(target, arms, versions, describe_machine())

    def _schedule(self, points: Sequence[Point], patience: float = 1.0) -> Schedule:
        return Schedule.of([(point, self.asks(point)) for point in points], patience)

    def _lengths(self, point: Point) -> tuple[Ask, ...]:
        """For what takes as long whatever the prompts are: thousands of points have gigabytes of them."""
        return self.traffics[point.workload].lengths(point.rate, point.requests)

    def asks(self, point: Point) -> tuple[Ask, ...]:
        """The same for all arms. Other prompts at each rate and side: none is in a cache from before."""
        traffic, side = self.traffics[point.workload], point.sensitivity
        seed = f"{point.rate:g} {point.repetition}"
        if side != NOMINAL:
            seed += f" {side.prefill_factor:g} {side.decode_factor:g}"
        return traffic.asks(point.rate, point.requests, seed, self.vocabulary)


def versions_here() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
