"""The directory that a run of `bench strategies` writes and its report reads:

    plan.json            `Plan`
    points/NAME.json     `PointResult`, one for each measured point
    logs/                logs of the deployments and the load generator

All times are in modelled seconds (or milliseconds): what a client measured, divided by `time_scale`. A real deployment
has wall times. None means "not measured".
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

from trtllm_disagg.engines.modelled.factors import Factors
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import spec_of

#: The version of the file format. A directory of another version is refused.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Arm:
    """One alternative of a comparison: a layout of GPUs under a strategy."""

    #: "1P3D decode_first", "4 agg", "2P2D auto length"; unique in a run.
    name: str
    #: A name of `strategies.STRATEGIES`.
    strategy: str
    agg_workers: int = 0
    prefill_workers: int = 0
    decode_workers: int = 0
    #: GPUs of all workers together.
    gpus: int = 1
    #: A name of `config.deciders.DECIDERS`.
    decider: str = "always"
    #: More flags of every worker, thresholds among them.
    flags: tuple[str, ...] = ()

    @property
    def waits_for_decode(self) -> bool:
        """Under a strategy without a first stage the frontend gives the client nothing before decode has begun."""
        return spec_of(self.strategy).entry_role is None


def gpu_count(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


@dataclass(frozen=True, slots=True)
class Workload:
    #: A word, unique in a run: "chat", "rag", "reasoning", "agentic", "trace", "bursts".
    name: str
    description: str
    #: Mean tokens of a request, over all turns.
    input_tokens: float
    output_tokens: float
    #: Requests in one conversation.
    turns: int = 1
    #: The trace that was replayed, as the user named it.
    trace_file: str | None = None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Factors by which all step times of prefill and of decode were multiplied."""

    prefill_factor: float = 1.0
    decode_factor: float = 1.0

    @property
    def factors(self) -> Factors:
        """As modelled engines read them."""
        return Factors(self.prefill_factor, self.decode_factor)

    @property
    def change(self) -> float:
        """The largest share by which step times were changed."""
        return max(abs(factor - 1) for factor in self.factors)


NOMINAL = Sensitivity()


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. `arm` and `workload` are names in the plan."""

    arm: str
    workload: str
    #: Requests that arrive in a modelled second, answered or not.
    rate: float
    #: From 0. All arms get the same prompts at the same times; each repetition has different ones.
    repetition: int = 0
    sensitivity: Sensitivity = NOMINAL
    time_scale: float = 1.0
    #: Requests sent at this point; 0 in records written before this field existed.
    requests: int = 0
    #: Planned seconds from the last arrival to the last answer; 0 in records written before this field existed.
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
    """Milliseconds of a request's consecutive parts. With the time of our own software, the network and the client
    (`PointResult.software`) they add up to its latency.
    """

    #: Waiting for a place in a prefill batch.
    queue: float = 0.0
    prefill: float = 0.0
    #: From the end of prefill until decode asks for the KV.
    handoff: float = 0.0
    #: Moving the KV, and waiting for the link.
    transfer: float = 0.0
    #: Waiting, with its KV, for a place in a decode batch.
    decode_wait: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        return self.modelled + self.handoff

    @property
    def modelled(self) -> float:
        """The time that GPUs and the link took."""
        return self.queue + self.prefill + self.moving + self.decode

    @property
    def moving(self) -> float:
        return self.transfer + self.decode_wait

    def before_first_token(self, arm_waits_for_decode: bool) -> float:
        """The part of `modelled` before the client has its first token."""
        return self.queue + self.prefill + (self.moving if arm_waits_for_decode else 0.0)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    #: When it was sent, from the beginning of the point.
    arrival_s: float
    input_tokens: int
    #: For a failed request: the tokens that arrived.
    output_tokens: int
    latency_ms: float
    #: None if no token arrived; `tpot_ms`: if no second one did.
    ttft_ms: float | None = None
    #: Mean of the gaps.
    tpot_ms: float | None = None
    #: Gaps between the pieces of the answer: a timeline that begins at `arrival_s` + `ttft_ms`.
    gaps_ms: tuple[float, ...] = ()
    #: Prompt tokens that were found in a prefix cache.
    cached_tokens: int | None = None
    #: None if the workers' logs are not available, as with --url.
    parts: Parts | None = None
    #: None: the request was answered.
    error: str | None = None
    session: str | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True)
class PointResult:
    point: Point
    requests: tuple[RequestRecord, ...]
    #: From the first arrival to the last answer.
    duration_s: float
    #: The share of our own software, 0 to 1, in "ttft", "tpot" and "latency" over all requests. Above 0.05 no
    #: conclusion is drawn from that time. Empty where it is not known, as with --url.
    software: Mapping[str, float] = field(default_factory=dict)
    #: The share of prompt tokens that were found in a prefix cache.
    kv_hit_rate: float | None = None
    #: The arm could not keep up: it ended long after the last arrival, or refused requests.
    is_saturated: bool = False
    #: The share of requests that ended while others arrived (measures.py). 1 if the arm kept up.
    done_share: float = 1.0
    #: The rate at which the load generator sent, as a share of the point's (measures.py). 1 if it kept to the schedule,
    #: and in records written before this field existed.
    sent_share: float = 1.0
    #: The exact command of each process: "frontend", "prefill-0", ..., "load".
    commands: Mapping[str, str] = field(default_factory=dict)
    #: Versions by package.
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    #: Of this machine, the point with its load generator.
    wall_s: float = 0.0

    @property
    def answered(self) -> tuple[RequestRecord, ...]:
        return tuple(request for request in self.requests if request.error is None)


@dataclass(frozen=True, slots=True)
class Software:
    """Wall milliseconds that our own software adds to a lone request, before its first token and after it."""

    first_token_ms: float
    rest_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The points to measure, in this order, and what they describe."""

    #: What is served, as "llama-3.1-8b on 1 h100_sxm a worker".
    subject: str
    arms: tuple[Arm, ...]
    workloads: tuple[Workload, ...]
    points: tuple[Point, ...]
    #: Points that the run added, at rates that `points` lack (starting.py).
    further: tuple[Point, ...] = ()
    #: False: a real deployment, measured in wall time.
    is_modelled: bool = True
    #: GPUs of one worker.
    gpus_per_worker: int = 1
    #: The command of this run.
    command: str = ""
    #: By workload, measured before the run to choose `time_scale`; empty if that was given.
    software: Mapping[str, Software] = field(default_factory=dict)
    #: All settings by name. A run with different settings is refused in the same directory.
    settings: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def every_point(self) -> tuple[Point, ...]:
        return self.points + self.further

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


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
        """Locks the directory while measuring: two runs would overwrite each other's logs. Raises ConfigError if
        another process has locked it.
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
        """Raises ConfigError if plan.json is missing, invalid or of another version."""
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
        """The results of all measured points, in the plan's order."""
        return (self.result(point) for point in self.plan().every_point if self.has(point))

    @property
    def _plan(self) -> Path:
        return self.path / "plan.json"

    def _file(self, point: Point) -> Path:
        return self.path / "points" / point.file_name


Record = TypeVar("Record", Plan, PointResult)


def write_whole(file: Path, content: bytes) -> None:
    """Replaces the file in one step: on a full disk its old content stays."""
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
