"""What a run of `bench strategies` leaves behind, and what its report reads: one directory, all of it JSON.

    plan.json            `Plan`
    points/NAME.json     `PointResult`, one a point that was measured
    logs/                of deployments and of the load generator

All times are in modelled seconds (or milliseconds): what a client measured, divided by `time_scale`; of a real
deployment they are the wall's. What is None was not measured.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import spec_of

#: Of the files. A directory of another version is refused.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Arm:
    """A layout of GPUs under a strategy: what is compared."""

    #: "1P3D decode_first", "4 agg", "2P2D auto length"; unique in a run.
    name: str
    #: A name of `strategies.STRATEGIES`.
    strategy: str
    agg_workers: int = 0
    prefill_workers: int = 0
    decode_workers: int = 0
    #: Of all workers.
    gpus: int = 1
    #: A name of `config.deciders.DECIDERS`.
    decider: str = "always"
    #: More flags of every worker, thresholds among them.
    flags: tuple[str, ...] = ()

    @property
    def waits_for_decode(self) -> bool:
        """Under a strategy without a first stage the frontend gives the client nothing before decode has begun."""
        return spec_of(self.strategy).entry_role is None


@dataclass(frozen=True, slots=True)
class Workload:
    #: A word, unique in a run: "chat", "rag", "reasoning", "agentic", "trace", "bursts".
    name: str
    description: str
    #: Tokens of a request, on average, over all turns.
    input_tokens: float
    output_tokens: float
    #: Requests that follow each other in one conversation.
    turns: int = 1
    #: The trace that was replayed, as the user named it.
    trace_file: str | None = None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """All step times of prefill, and of decode, were multiplied by it."""

    prefill_factor: float = 1.0
    decode_factor: float = 1.0


NOMINAL = Sensitivity()


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. `arm` and `workload` are names in the plan."""

    arm: str
    workload: str
    #: Requests a modelled second that arrive, whether or not they are answered.
    rate: float
    #: From 0. Prompts and arrival times are the same in all arms, and others in each repetition.
    repetition: int = 0
    sensitivity: Sensitivity = NOMINAL
    time_scale: float = 1.0
    #: That are sent; 0 in runs of before, which had the same number at each rate.
    requests: int = 0
    #: From the last arrival until the last answer, as planned; 0 in runs of before.
    drain_s: float = 0.0

    @property
    def file_name(self) -> str:
        factors = self.sensitivity
        name = (
            f"{self.arm} {self.workload} rate{self.rate:g} p{factors.prefill_factor:g} d{factors.decode_factor:g} "
            f"r{self.repetition} x{self.time_scale:g}"
        )
        return "".join(c if c.isalnum() or c in ".-" else "_" for c in name) + ".json"


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the milliseconds of a request went. They follow each other and add up to its latency, but for what our own
    software, the network and the client took (`PointResult.software`).
    """

    #: It waited for a place in a batch of prefill.
    queue: float = 0.0
    prefill: float = 0.0
    #: From the end of prefill until the KV was asked for.
    handoff: float = 0.0
    #: Until the KV was there; it may have waited for the link.
    transfer: float = 0.0
    #: It waited, with its KV, for a place in a batch of decode.
    decode_wait: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        return self.modelled + self.handoff

    @property
    def modelled(self) -> float:
        """What GPUs and the link took."""
        return self.queue + self.prefill + self.moving + self.decode

    @property
    def moving(self) -> float:
        return self.transfer + self.decode_wait

    def before_first_token(self, arm_waits_for_decode: bool) -> float:
        """Of what is modelled: until a client has its first token."""
        return self.queue + self.prefill + (self.moving if arm_waits_for_decode else 0.0)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    #: When it was sent, since the beginning of the point.
    arrival_s: float
    input_tokens: int
    #: Of a request that failed: those that came.
    output_tokens: int
    latency_ms: float
    #: None without a token, or without a second one.
    ttft_ms: float | None = None
    #: Mean of the gaps.
    tpot_ms: float | None = None
    #: Between one piece of the answer and the next: a timeline from `arrival_s` + `ttft_ms` on.
    gaps_ms: tuple[float, ...] = ()
    #: Of the prompt, found in a prefix cache.
    cached_tokens: int | None = None
    #: None where the workers did not tell, as behind --url.
    parts: Parts | None = None
    #: None: it was answered.
    error: str | None = None
    session: str | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True)
class PointResult:
    point: Point
    requests: tuple[RequestRecord, ...]
    #: From the first arrival to the last answer.
    duration_s: float
    #: Share of each measured time that was no GPU's but our own software's: by "ttft", "tpot" and "latency"; of all
    #: requests, between 0 and 1. Above 0.05 nothing is to be concluded of that time. Empty where it is not known, as
    #: behind --url.
    software: Mapping[str, float] = field(default_factory=dict)
    #: Of prompt tokens: found in a cache.
    kv_hit_rate: float | None = None
    #: The arm was asked for more than it can do: it ended a good deal after the arrivals did, or refused requests.
    is_saturated: bool = False
    #: Of the requests that came while it was full: as many as ended in that time. 1 where it was not full.
    done_share: float = 1.0
    #: What was started, exactly, by what it is: "frontend", "prefill-0", ..., "load".
    commands: Mapping[str, str] = field(default_factory=dict)
    #: Of packages, by their names.
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    #: Of this machine, the point with its load generator.
    wall_s: float = 0.0

    @property
    def answered(self) -> tuple[RequestRecord, ...]:
        return tuple(request for request in self.requests if request.error is None)


@dataclass(frozen=True, slots=True)
class Software:
    """Wall milliseconds that our own software adds to a request that is alone: before its first token, and after it."""

    first_token_ms: float
    rest_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, in this order."""

    #: What is served: "llama-3.1-8b on 1 h100_sxm a worker", or what the user says of a real deployment.
    subject: str
    arms: tuple[Arm, ...]
    workloads: tuple[Workload, ...]
    points: tuple[Point, ...]
    #: Added by the run itself, at rates that `points` turned out to lack (further.py).
    further: tuple[Point, ...] = ()
    #: Whether times are modelled; False: of a real deployment.
    is_modelled: bool = True
    #: GPUs of one worker.
    gpus_per_worker: int = 1
    #: The command of this run.
    command: str = ""
    #: By workload, measured on this machine before the run, to choose `time_scale`; empty: that was given.
    software: Mapping[str, Software] = field(default_factory=dict)
    #: All that it was made of, to tell another run in the same directory: settings by name.
    settings: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def every_point(self) -> tuple[Point, ...]:
        return self.points + self.further

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def workload(self, name: str) -> Workload:
        return next(workload for workload in self.workloads if workload.name == name)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path

    @property
    def has_plan(self) -> bool:
        return self._plan.is_file()

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """For the time of measuring: two runs would measure the same points, and write over each other's logs. Raises
        ConfigError while another process has it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                allowed = "a directory in which no other run is measuring"
                raise ConfigError.bad_value("--out", str(self.path), allowed) from None
            yield

    def save_plan(self, plan: Plan) -> None:
        write_whole(self._plan, msgspec.json.encode(plan))

    def plan(self) -> Plan:
        """Raises ConfigError for a file that is not there, is none, or is of another version."""
        plan = _read(self._plan, Plan)
        if plan.version != VERSION:
            raise ConfigError.bad_value(str(self._plan), f"version {plan.version}", f"version {VERSION}")
        return plan

    def has(self, point: Point) -> bool:
        return self._file(point).is_file()

    def save(self, result: PointResult) -> None:
        write_whole(self._file(result.point), msgspec.json.encode(result))

    def result(self, point: Point) -> PointResult:
        return _read(self._file(point), PointResult)

    def results(self) -> Iterator[PointResult]:
        """Of the points that were measured, in the plan's order."""
        return (self.result(point) for point in self.plan().every_point if self.has(point))

    @property
    def _plan(self) -> Path:
        return self.path / "plan.json"

    def _file(self, point: Point) -> Path:
        return self.path / "points" / point.file_name


Record = TypeVar("Record", Plan, PointResult)


def write_whole(file: Path, content: bytes) -> None:
    """Or not at all: on a full disk what was there stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _read(file: Path, kind: type[Record]) -> Record:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ConfigError.bad_value("run directory", str(file.parent), f"one with {file.name}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError.bad_value(str(file), str(error), "a file of bench strategies") from error
