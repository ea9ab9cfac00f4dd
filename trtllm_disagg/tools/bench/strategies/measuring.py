"""Measures several points after each other, with one deployment and one run of the load generator."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path

from trtllm_disagg.tools.bench.strategies.aiperf import AIPerf, Seen, Send, read_export
from trtllm_disagg.tools.bench.strategies.measures import done_share, sent_share
from trtllm_disagg.tools.bench.strategies.records import Arm, Point, PointResult, RequestRecord, Sensitivity
from trtllm_disagg.tools.bench.strategies.spent import Lateness, RequestLogs, lateness_of, software_share
from trtllm_disagg.tools.bench.strategies.workloads import Ask
from trtllm_disagg.tools.up.lifecycle import Deployment
from trtllm_disagg.tools.up.plan import NO_WORKERS

#: Before the first point, while engines connect to each other and the request plane warms up.
_WARM_UP_REQUESTS, _WARM_UP_SECONDS = 4, 8.0
#: The pause after a point: a share of the point's time, plus its planned drain times a factor, plus some seconds.
_PAUSE_SHARE, _PAUSE_DRAINS, _PAUSE_SECONDS = 0.15, 1.25, 2.0
_REQUEST_SECONDS = 3600.0
_LOOK_SECONDS, _FIRST_LOOK_SECONDS = 2.0, 0.2

#: How long before a point its factors are set: engines read them when they begin to work after a pause.
_AHEAD_SECONDS = 2.0


@dataclass
class FactorSwitch:
    """Sets the factors of each point during a run of the load generator. `moments`: wall seconds from its first
    request, in order.
    """

    moments: Sequence[tuple[float, Sensitivity]]
    set_factors: Callable[[Sensitivity], None]
    #: When which factors were set, in nanoseconds since the epoch.
    done: list[tuple[int, Sensitivity]] = field(default_factory=list)

    def begin(self) -> None:
        """Sets the first factors, before the load generator is started."""
        self._set(self.moments[0][1])

    async def follow(self, has_begun: Callable[[], Awaitable[None]]) -> None:
        """Sets all further factors. `has_begun` returns at the first request or a moment later."""
        if all(sensitivity == self.moments[0][1] for _, sensitivity in self.moments):
            return
        await has_begun()
        origin = time.monotonic()
        for at, sensitivity in self.moments[1:]:
            await asyncio.sleep(max(0.0, origin + at - _AHEAD_SECONDS - time.monotonic()))
            if sensitivity != self.done[-1][1]:
                self._set(sensitivity)

    def _set(self, sensitivity: Sensitivity) -> None:
        self.set_factors(sensitivity)
        self.done.append((time.time_ns(), sensitivity))


def was_in_force(done: Sequence[tuple[int, Sensitivity]], wanted: Sensitivity, begin: int, end: int) -> bool:
    """Whether the `wanted` factors were set from `begin` to `end` of a point."""
    before = [sensitivity for at, sensitivity in done if at <= begin]
    return before[-1:] == [wanted] and not any(begin < at < end for at, _ in done)


@dataclass(frozen=True, slots=True)
class Stretch:
    """One point of a schedule. Wall seconds from the first request."""

    point: Point
    asks: tuple[Ask, ...]
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Schedule:
    stretches: tuple[Stretch, ...]

    @classmethod
    def of(cls, points: Sequence[tuple[Point, tuple[Ask, ...]]], patience: float = 1.0) -> Schedule:
        """`patience`: a factor on all pauses."""
        stretches, now = [], _WARM_UP_SECONDS
        for point, asks in points:
            end = now + asks[-1].arrival * point.time_scale
            stretches.append(Stretch(point, asks, now, end))
            drain = _PAUSE_DRAINS * point.drain_s * point.time_scale
            now = end + patience * (_PAUSE_SHARE * (end - now) + drain + _PAUSE_SECONDS)
        return cls(tuple(stretches))

    @property
    def seconds(self) -> float:
        """Until the last request is sent."""
        return self.stretches[-1].end

    def sends(self) -> list[Send]:
        prompt, every = self.stretches[0].asks[0].prompt[:64], _WARM_UP_SECONDS / _WARM_UP_REQUESTS / 2
        warm = [Send(f"warm-{i}", i * every, prompt[i:], 4) for i in range(_WARM_UP_REQUESTS)]
        return warm + [
            Send(
                f"{number}-{place}", s.begin + ask.arrival * s.point.time_scale, ask.prompt, ask.output_tokens
            )
            for number, s in enumerate(self.stretches)
            for place, ask in enumerate(s.asks)
        ]


@dataclass(frozen=True)
class Target:
    """A deployment that serves: one that this benchmark has started, or one behind a URL."""

    url: str
    model: str
    #: None behind a URL: its processes are on another machine.
    deployment: Deployment | None = None
    #: The file from which modelled engines read their factors. None behind a URL.
    factors: Path | None = None

    @property
    def commands(self) -> Mapping[str, str]:
        if self.deployment is None:
            return {"url": self.url}
        return {process.spec.name: shlex.join(process.spec.argv) for process in self.deployment.processes}

    def logs(self) -> RequestLogs | None:
        """None if the logs are on another machine."""
        if self.deployment is None:
            return None
        (frontend,) = self.deployment.of_role("frontend")
        workers = [process.log for process in self.deployment.processes if process.role not in NO_WORKERS]
        return RequestLogs(frontend.log, workers)

    def lateness(self) -> dict[str, Lateness]:
        """Worker -> how late its steps ended; empty behind a URL."""
        processes = self.deployment.processes if self.deployment else ()
        ports = {process.spec.name: process.spec.system_port for process in processes}
        return {name: lateness_of(port) for name, port in ports.items() if port is not None}

    def set_factors(self, sensitivity: Sensitivity) -> None:
        """Modelled engines multiply step times by these factors from their next pause on."""
        if self.factors is not None:
            sensitivity.factors.write(self.factors)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What a run of the load generator measured."""

    schedule: Schedule
    seen: Mapping[str, Seen]
    logs: RequestLogs | None
    #: Readings with their time in nanoseconds since the epoch.
    late: Sequence[tuple[int, Mapping[str, Lateness]]]
    command: str
    #: When which factors were set.
    factors: Sequence[tuple[int, Sensitivity]]

    def results(
        self, target: Target, arms: Mapping[str, Arm], versions: Mapping[str, str], machine: str
    ) -> list[PointResult]:
        """The results of all points that overlapped neither requests of an earlier point nor a change of factors. The
        other points have to be measured again. `arms` by name.
        """
        results, busy_until = [], 0
        for number, stretch in enumerate(self.schedule.stretches):
            seen = [self.seen.get(f"{number}-{place}") for place in range(len(stretch.asks))]
            there = [each for each in seen if each is not None]
            if not there:
                continue
            begin, end = min(each.begin_ns for each in there), max(each.end_ns for each in there)
            if begin > busy_until and was_in_force(self.factors, stretch.point.sensitivity, begin, end):
                result = self._result(stretch, seen, begin, end, arms[stretch.point.arm])
                commands = {**target.commands, "load": self.command}
                results.append(replace(result, commands=commands, versions=versions, machine=machine))
            busy_until = max(busy_until, end)
        return results

    def _result(
        self, stretch: Stretch, seen: Sequence[Seen | None], begin: int, end: int, arm: Arm
    ) -> PointResult:
        scale = stretch.point.time_scale
        requests = tuple(
            self._record(ask, own, begin, scale) for ask, own in zip(stretch.asks, seen, strict=True)
        )
        done = done_share([r.arrival_s for r in requests], [r.latency_ms / 1000 for r in requests])
        planned = [ask.arrival for ask, own in zip(stretch.asks, seen, strict=True) if own is not None]
        sent = [(own.begin_ns - begin) / 1e9 / scale for own in seen if own is not None]
        hits = [(r.cached_tokens, r.input_tokens) for r in requests if r.cached_tokens is not None]
        return PointResult(
            point=stretch.point,
            requests=requests,
            duration_s=(end - begin) / 1e9 / scale,
            software=software_share(requests, arm, self.late_ms(begin, end)),
            kv_hit_rate=sum(hit for hit, _ in hits) / sum(of for _, of in hits) if hits else None,
            is_saturated=done < 1 or any(request.error for request in requests),
            done_share=done,
            sent_share=sent_share(planned, sent),
            wall_s=(end - begin) / 1e9,
        )

    def _record(self, ask: Ask, seen: Seen | None, begin: int, scale: float) -> RequestRecord:
        if seen is None:
            return RequestRecord(ask.arrival, len(ask.prompt), 0, 0.0, error="not sent", session=ask.session)
        parts = self.logs.parts(seen.request_id) if self.logs is not None and seen.error is None else None
        return RequestRecord(
            arrival_s=(seen.begin_ns - begin) / 1e9 / scale,
            input_tokens=seen.input_tokens or len(ask.prompt),
            output_tokens=seen.output_tokens,
            latency_ms=seen.latency_ms / scale,
            ttft_ms=None if seen.ttft_ms is None else seen.ttft_ms / scale,
            tpot_ms=None if seen.tpot_ms is None else seen.tpot_ms / scale,
            gaps_ms=tuple(round(gap / scale, 3) for gap in seen.gaps_ms),
            cached_tokens=seen.cached_tokens,
            parts=parts,
            error=seen.error or _shortfall(ask, seen),
            session=ask.session,
            turn=ask.turn,
        )

    def late_ms(self, begin: int, end: int) -> float:
        """The mean lateness, between two moments, of the worker that was late the most."""
        before = [looked for at, looked in self.late if at <= begin] or [
            looked for _, looked in self.late[:1]
        ]
        after = [looked for at, looked in self.late if at >= end] or [looked for _, looked in self.late[-1:]]
        if not before or not after:
            return 0.0
        return max(
            (now.since(before[-1].get(name, Lateness())) for name, now in after[0].items()), default=0.0
        )


def _shortfall(ask: Ask, seen: Seen) -> str | None:
    """Requests want a number of tokens, whatever ends a text. A shorter answer is another workload."""
    is_short = seen.output_tokens < ask.output_tokens
    return f"an answer of {seen.output_tokens} tokens instead of {ask.output_tokens}" if is_short else None


async def measure(schedule: Schedule, target: Target, aiperf: AIPerf, directory: Path) -> LoadRun:
    """Raises LoadFailedError."""
    late: list[tuple[int, Mapping[str, Lateness]]] = []
    moments = [(stretch.begin, stretch.point.sensitivity) for stretch in schedule.stretches]
    switching = FactorSwitch(moments, target.set_factors)

    async def look() -> None:
        if (now := await _lateness(target)) is not None:
            late.append((time.time_ns(), now))

    async def keep_looking() -> None:
        while True:
            await look()
            await asyncio.sleep(_LOOK_SECONDS)

    switching.begin()
    beside = [
        asyncio.create_task(keep_looking(), name="lateness of workers"),
        asyncio.create_task(switching.follow(lambda: _first_step(target)), name="factors of points"),
    ]
    try:
        command = await aiperf.run(schedule.sends(), target.url, target.model, directory, _REQUEST_SECONDS)
        await look()
    finally:
        for task in beside:
            task.cancel()
        for task in beside:
            with suppress(asyncio.CancelledError, OSError):
                await task
    seen = {each.name: each for each in read_export(directory)}
    return LoadRun(schedule, seen, target.logs(), late, command, switching.done)


async def _first_step(target: Target) -> None:
    """Returns at the first step of a modelled engine from now on, or a moment later."""
    before = None
    while True:
        now = await _lateness(target)
        if before is not None and now is not None and now != before:
            return
        before = now if before is None else before
        await asyncio.sleep(_FIRST_LOOK_SECONDS)


async def _lateness(target: Target) -> Mapping[str, Lateness] | None:
    """None if a worker gives no metrics, or not all: it has died, and its requests fail, or it is busy."""
    try:
        return await asyncio.to_thread(target.lateness)
    except (OSError, HTTPException, ValueError):
        return None
