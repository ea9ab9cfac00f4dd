"""Runs AIPerf, the load generator: one sweep over rates, and what it writes of each rate."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.tools.plan.slo import Slo
from trtllm_disagg.tools.plan.workloads import Traffic

#: The version in our extra `[bench]`.
VERSION = "0.13.0"
_REMEDY = f"pip install 'trtllm-disagg[bench]' brings it, or aiperf=={VERSION} in any environment"
_EXPORT, _TRACE = "profile_export_aiperf.json", "trace.jsonl"
#: The tokenizer's name in the cache that AIPerf gets.
_TOKENIZER = "bench/tokenizer"
#: A limit of ours -> AIPerf's metric.
_METRICS = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "latency": "request_latency"}
_LOG_LINES = 12
_KILLED_AFTER = 10.0


class LoadFailedError(DisaggError):
    """AIPerf ended without results."""


@dataclass(frozen=True, slots=True)
class Load:
    """One sweep. Rates in requests a wall second, limits in wall milliseconds."""

    url: str
    model: str
    #: A directory with a tokenizer.
    tokenizer: Path
    traffic: Traffic
    rates: tuple[float, ...]
    requests: int
    slo: Slo

    def flags(self, directory: Path) -> tuple[str, ...]:
        """Each request has its own connection: on an open one Linux delays the first token by up to 40 ms."""
        goodput = " ".join(f"{_METRICS[name]}:{limit:g}" for name, limit in self.slo.limits.items())
        traffic = self.traffic.aiperf
        if self.traffic.lines:
            traffic += ("--input-file", str(directory / _TRACE))
        return (
            *("--model", self.model, "--url", self.url, "--tokenizer", _TOKENIZER),
            *("--endpoint-type", "chat" if "--conversation-turn-mean" in traffic else "completions"),
            *("--streaming", "--use-server-token-count", "--extra-inputs", "ignore_eos:true", *traffic),
            *("--request-rate", ",".join(f"{rate:g}" for rate in self.rates)),
            *("--request-count", str(self.requests), "--goodput", goodput),
            # Every layout gets the same prompts; each rate has its own, so that none is cached.
            *("--random-seed", "1", "--no-parameter-sweep-same-seed", "--connection-reuse-strategy", "never"),
            *("--ui", "none", "--workers-max", "1", "--record-processors", "1", "--export-level", "summary"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(directory)),
        )


class Metric(msgspec.Struct, frozen=True):
    avg: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


class _Phase(msgspec.Struct, frozen=True):
    rate: float


class _Settings(msgspec.Struct, frozen=True):
    phases: list[_Phase]


class RateResult(msgspec.Struct, frozen=True):
    """What AIPerf writes of one rate, on the wall's clock: requests/s, tokens/s, milliseconds, a share, percent."""

    input_config: _Settings
    request_throughput: Metric
    request_error_rate: Metric
    good_request_fraction: Metric
    output_token_throughput: Metric
    time_to_first_token: Metric
    #: Answers of one token have none.
    inter_token_latency: Metric = Metric()
    output_token_throughput_per_user: Metric = Metric()

    @property
    def rate(self) -> float:
        return self.input_config.phases[-1].rate

    @property
    def good_share(self) -> float:
        """The share of requests within all limits. AIPerf's own is of the answered ones."""
        return self.good_request_fraction.avg * (1 - self.request_error_rate.avg / 100)


@dataclass(frozen=True, slots=True)
class AIPerf:
    executable: Path

    @classmethod
    def find(cls, given: Path | None) -> AIPerf:
        """Finds `given`, or the command in this environment, or in PATH. Raises ConfigError."""
        beside = Path(sys.executable).with_name("aiperf")
        found = given or (beside if beside.exists() else shutil.which("aiperf"))
        if found is None:
            raise ConfigError(f"AIPerf is missing; {_REMEDY}; --aiperf names its command")
        if not Path(found).is_file() or not os.access(found, os.X_OK):
            raise ConfigError.bad_value("--aiperf", str(found), f"AIPerf's command: {_REMEDY}")
        return cls(Path(found))

    async def sweep(self, load: Load, directory: Path) -> list[RateResult]:
        """Sends all requests at each rate; AIPerf's files go to the existing `directory`. Raises LoadFailedError."""
        argv = (str(self.executable), "profile", *load.flags(directory))
        environment = _files_of(load, directory)
        (directory / "command").write_text(shlex.join(argv) + "\n")
        with (directory / "aiperf.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                # Its child processes end with its process group.
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                await _end(process)
        results = read_results(directory)
        if len(results) < len(load.rates):
            lines = (directory / "aiperf.log").read_text(errors="replace").splitlines()
            head = f"aiperf: exit code {code}, results for {len(results)} of {len(load.rates)} rates; last lines:"
            raise LoadFailedError("\n  ".join([head, *lines[-_LOG_LINES:]]))
        return results


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends AIPerf and all its child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _KILLED_AFTER)


def read_results(directory: Path) -> list[RateResult]:
    """One for each rate that AIPerf measured, by growing rate. Raises LoadFailedError for an unknown format.

    Its own summary of a sweep is missing where only one rate was measured.
    """
    results = []
    for file in directory.glob(f"**/{_EXPORT}"):
        try:
            results.append(msgspec.json.decode(file.read_bytes(), type=RateResult))
        except msgspec.MsgspecError as error:
            raise LoadFailedError(
                f"aiperf: {file.name} is not as version {VERSION} writes it: {error}"
            ) from error
    return sorted(results, key=lambda result: result.rate)


def _files_of(load: Load, directory: Path) -> dict[str, str]:
    """Writes what AIPerf reads into `directory`. Returns the environment in which it finds the tokenizer: the processes
    that make a trace's prompts look for it in a cache of the Hugging Face hub only.
    """
    if load.traffic.lines:
        (directory / _TRACE).write_bytes(b"\n".join(map(msgspec.json.encode, load.traffic.lines)))
    cached = directory / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
    for name in ("refs", "snapshots"):
        (cached / name).mkdir(parents=True)
    (cached / "refs" / "main").write_text("0")
    (cached / "snapshots" / "0").symlink_to(load.tokenizer.absolute(), target_is_directory=True)
    return os.environ | {"HF_HUB_CACHE": str(directory / "hub"), "HF_HUB_OFFLINE": "1"}


def front(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The Pareto points, by falling first number: no other point is superior in both."""
    best = float("-inf")
    for x, y in sorted(set(points), reverse=True):
        if y > best:
            yield x, y
            best = y
