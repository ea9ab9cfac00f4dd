"""Measures the points of a plan until all are measured or the run is interrupted."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import yaml

from trtllm_disagg.config.thresholds import ADMISSION
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.processes.short_log import halves
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.bench.machine import describe_machine
from trtllm_disagg.tools.bench.strategies.aiperf import AIPerf, LoadFailedError
from trtllm_disagg.tools.bench.strategies.measuring import Schedule, Target, measure
from trtllm_disagg.tools.bench.strategies.planning import LONGEST_WAIT_SECONDS, Engines
from trtllm_disagg.tools.bench.strategies.records import (
    NOMINAL,
    Plan,
    Point,
    PointResult,
    RunDirectory,
    Sensitivity,
)
from trtllm_disagg.tools.bench.strategies.workloads import Ask, Traffic
from trtllm_disagg.tools.up.lifecycle import running_deployment
from trtllm_disagg.tools.up.plan import DeploymentConfig, ProcessRole
from trtllm_disagg.tools.up.up_command import default_name

_PROGRESS_SECONDS = 5.0
#: Seconds to start a deployment and the load generator, as long as none has been measured.
_GUESSED_START = 60.0
#: Requests at overloaded workers wait without a bound: a request that is refused, or computed again because its KV was
#: released, does not show the size of the overload. KV leases last as long (planning.py).
_NO_BOUND = tuple(text for name in ADMISSION for text in (flag_of(name), "0"))
_DEADLINES = ("prefill_timeout", "first_decode_token_timeout", "next_decode_token_timeout")
_NO_DEADLINE = tuple(text for name in _DEADLINES for text in (flag_of(name), f"{LONGEST_WAIT_SECONDS:g}"))
_FACTORS = "factors.json"
#: Deployments in a row that measure none of their points; then the run ends.
_MOST_ATTEMPTS = 3
_PACKAGES = ("trtllm-disagg", "ai-dynamo", "aiconfigurator-core", "tensorrt-llm")

#: What a deployment is started for: an arm, a sensitivity and a time scale.
Key = tuple[str, Sensitivity, float]


def batches(points: Iterable[Point], is_quick: bool = False) -> list[tuple[Key, list[Point]]]:
    """Groups the points that one deployment serves, in the plan's order. In a quick run it serves all sides of the
    band; a long run starts one for each side, so that a failure loses less.
    """
    grouped: dict[Key, list[Point]] = {}
    for point in points:
        sensitivity = NOMINAL if is_quick else point.sensitivity
        grouped.setdefault((point.arm, sensitivity, point.time_scale), []).append(point)
    return list(grouped.items())


@dataclass(frozen=True, slots=True)
class Deployments:
    """Deployments that this benchmark starts, one at a time."""

    plan: Plan
    engines: Engines
    directory: RunDirectory
    worker_args: tuple[str, ...] = ()

    @asynccontextmanager
    async def serving(self, key: Key) -> AsyncIterator[Target]:
        place = self._place(key)
        # A Unix socket's path has room for 107 bytes, and arms' names are long.
        with TemporaryDirectory(prefix="trtllm-disagg-bench-", ignore_cleanup_errors=True) as scratch:
            config = replace(self.config(key), run_dir=Path(scratch))
            try:
                async with running_deployment(config) as deployment:
                    model, factors = config.served_model_name, place / _FACTORS
                    yield Target(deployment.base_url, model, deployment, factors)
            finally:
                for log in config.run_dir.glob("*.log"):
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
        sensitivity.factors.write(place / _FACTORS)
        configs: dict[ProcessRole, Path] = {}
        for role in spec_of(arm.strategy).roles:
            file = place / f"{role}.yaml"
            file.write_text(yaml.safe_dump(self.engines.for_point(role, place / _FACTORS, scale)))
            configs[role] = file
        calls_workers = spec_of(arm.strategy).is_worker_side
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
            # Unfinished requests are of no use.
            drain_seconds=1.0,
            worker_args=(*(_NO_DEADLINE if calls_workers else ()), *_NO_BOUND, *arm.flags, *self.worker_args),
        )


@dataclass(frozen=True, slots=True)
class Urls:
    """URLs, by arm, of deployments that already serve."""

    urls: Mapping[str, str]
    model: str

    @asynccontextmanager
    async def serving(self, key: Key) -> AsyncIterator[Target]:
        yield Target(self.urls[key[0]], self.model)


def duration(seconds: int) -> str:
    """`seconds` as text, as precise as an estimate is."""
    minutes, hours, days = seconds // 60, seconds // 3600, seconds / 86400
    if days >= 2:
        return f"{days:.0f} days"
    if hours >= 2:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {seconds % 60:02d} s"


@dataclass
class Progress:
    """Prints what is being measured and the remaining time: at each change, and every few seconds."""

    total: int
    out: TextIO = sys.stderr
    done: int = 0
    #: Wall seconds of sending requests, for each batch that has not begun.
    sending: list[float] = field(default_factory=list)
    #: Further seconds that each finished batch took: start, pauses and the last answers.
    took: list[float] = field(default_factory=list)
    what: str = "asking AIPerf for its version"
    clock: Callable[[], float] = time.monotonic
    #: When the running batch will have sent all requests; 0.0: no batch is running.
    _sent_at: float = 0.0

    def begin(self, what: str, sending: float) -> None:
        self._sent_at = self.clock() + sending
        self.go_on(what)

    def go_on(self, what: str) -> None:
        self.what = what
        self.say()

    def end(self, measured: int) -> None:
        """Ends the running batch. Points that it could not measure become another batch."""
        self.done += measured
        self.took.append(max(0.0, self.clock() - self._sent_at))
        self._sent_at = 0.0

    def remaining_seconds(self) -> float:
        """An estimate. A batch that takes longer than planned does not change that of the others."""
        beside = sum(self.took) / len(self.took) if self.took else _GUESSED_START
        now = max(0.0, self._sent_at + beside - self.clock()) if self._sent_at else 0.0
        return now + sum(self.sending) + len(self.sending) * beside

    def say(self) -> None:
        seconds = round(self.remaining_seconds())
        left = f"about {duration(seconds)} left" if seconds else "longer than planned"
        print(f"[{self.done}/{self.total} points] {self.what}: {left}", file=self.out)

    async def keep_saying(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            self.say()


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
        """The batches of all points that have not been measured."""
        missing = (point for point in self.plan.every_point if not self.directory.has(point))
        return batches(missing, self.is_quick)

    def progress(self) -> Progress:
        """A progress with the expected duration of the run as `remaining_seconds`."""
        groups = self.groups()
        count = len(self.plan.every_point)
        progress = Progress(count, done=count - sum(len(points) for _, points in groups))
        # Only the lengths of requests: real prompts would take gigabytes.
        progress.sending = [
            Schedule.of([(p, self.traffics[p.workload].lengths(p.rate, p.requests)) for p in points]).seconds
            for _, points in groups
        ]
        return progress

    def going_on_with(self, further: Sequence[Point]) -> Runner:
        """The same run with more points, which are also saved in its directory's plan."""
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
        attempt, failed, again = 1, 0, ""
        while points:
            schedule = Schedule.of([(point, self.asks(point)) for point in points], attempt)
            progress.begin(f"{key[0]}: starting{again}", schedule.seconds)
            async with self.targets.serving(key) as target:
                told = ", ".join(dict.fromkeys(point.workload for point in points))
                progress.go_on(f"{key[0]}: {len(points)} points, {told}{again}")
                results = await self.measured(schedule, target, versions)
            self._save(results)
            progress.end(len(results))
            saved = {result.point for result in results}
            points = [point for point in points if point not in saved]
            failed = 0 if saved else failed + 1
            if failed == _MOST_ATTEMPTS:
                raise LoadFailedError(
                    f"{points[0].arm}: {points[0].workload} at {points[0].rate:g} requests/s was not measured in "
                    f"{failed} attempts: its requests overlapped those of other points, or were sent while step times "
                    "changed; fewer --requests or a longer --time-scale may help"
                )
            # Points overlapped: pauses get longer, and a new deployment has empty caches for the same prompts.
            attempt, again = attempt + 1, ", again with longer pauses"

    def _save(self, results: Sequence[PointResult]) -> None:
        """Raises LoadFailedError if all requests of a point failed: its deployment is gone; the run may go on later."""
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

    async def measured(
        self, schedule: Schedule, target: Target, versions: Mapping[str, str]
    ) -> list[PointResult]:
        place = self.directory.logs / "load" / schedule.stretches[0].point.file_name.removesuffix(".json")
        measured = await measure(schedule, target, self.aiperf, place.absolute())
        arms = {arm.name: arm for arm in self.plan.arms}
        return measured.results(target, arms, versions, describe_machine())

    def asks(self, point: Point) -> tuple[Ask, ...]:
        """The requests of a point, the same for all arms. Each rate and side has other prompts: none is cached."""
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
