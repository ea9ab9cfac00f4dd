"""Runs AIPerf, the load generator: one sweep over rates, and what it says of each rate."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.tools.plan.slo import Slo

#: The version in our extra `[bench]`.
VERSION = "0.13.0"
_REMEDY = f"pip install 'trtllm-disagg[bench]' brings it, or aiperf=={VERSION} in any environment"
_SWEEP = Path("sweep_aggregate", "profile_export_aiperf_sweep.json")
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
    #: AIPerf's flags for the traffic (plan/workloads.py).
    traffic: tuple[str, ...]
    rates: tuple[float, ...]
    requests: int
    slo: Slo

    def flags(self, directory: Path) -> tuple[str, ...]:
        """Each request has its own connection: on an open one Linux delays the first token by up to 40 ms."""
        goodput = " ".join(f"{_METRICS[name]}:{limit:g}" for name, limit in self.slo.limits.items())
        return (
            *("--model", self.model, "--url", self.url, "--tokenizer", str(self.tokenizer.absolute())),
            *("--endpoint-type", "chat" if "--conversation-turn-mean" in self.traffic else "completions"),
            *("--streaming", "--use-server-token-count", "--extra-inputs", "ignore_eos:true", *self.traffic),
            *("--request-rate", ",".join(f"{rate:g}" for rate in self.rates)),
            *("--request-count", str(self.requests), "--goodput", goodput),
            # Every layout gets the same prompts; each rate has its own, so that none is cached.
            *("--random-seed", "1", "--no-parameter-sweep-same-seed", "--connection-reuse-strategy", "never"),
            *("--ui", "none", "--workers-max", "1", "--record-processors", "1", "--export-level", "summary"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(directory)),
        )


class RateResult(msgspec.Struct, frozen=True):
    """What AIPerf says of one rate, on the wall's clock: requests/s, milliseconds, tokens/s."""

    rate: float
    #: The share of requests within all limits.
    good_share: float
    requests_s: float
    tokens_s: float
    tokens_s_user: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    error_percent: float


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
        (directory / "command").write_text(shlex.join(argv) + "\n")
        with (directory / "aiperf.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                # Its child processes end with its process group.
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                await _end(process)
        if not (directory / _SWEEP).is_file():
            lines = (directory / "aiperf.log").read_text(errors="replace").splitlines()
            text = "\n  ".join([f"aiperf: exit code {code}; last lines:", *lines[-_LOG_LINES:]])
            raise LoadFailedError(text)
        return read_sweep(directory)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends AIPerf and all its child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _KILLED_AFTER)


class _Metric(msgspec.Struct, frozen=True):
    avg: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


class _Combination(msgspec.Struct, frozen=True):
    parameters: dict[str, float]
    metrics: dict[str, _Metric]


class _Sweep(msgspec.Struct, frozen=True):
    per_combination_metrics: list[_Combination]


def read_sweep(directory: Path) -> list[RateResult]:
    """By growing rate. Raises LoadFailedError for an unknown format."""
    try:
        sweep = msgspec.json.decode((directory / _SWEEP).read_bytes(), type=_Sweep)
        results = [_result(each.parameters["rate"], each.metrics) for each in sweep.per_combination_metrics]
    except (msgspec.MsgspecError, KeyError) as error:
        raise LoadFailedError(
            f"aiperf: {_SWEEP.name} is not as version {VERSION} writes it: {error!r}"
        ) from error
    return sorted(results, key=lambda result: result.rate)


def _result(rate: float, metrics: Mapping[str, _Metric]) -> RateResult:
    none = _Metric()
    ttft, tpot = metrics.get(_METRICS["ttft"], none), metrics.get(_METRICS["tpot"], none)
    errors = metrics.get("request_error_rate", none).avg
    # AIPerf's share is of the answered requests.
    good = metrics.get("good_request_fraction", none).avg * (1 - errors / 100)
    return RateResult(
        rate=rate,
        good_share=good,
        requests_s=metrics["request_throughput"].avg,
        tokens_s=metrics.get("output_token_throughput", none).avg,
        tokens_s_user=metrics.get("output_token_throughput_per_user", none).p50,
        ttft_p50=ttft.p50,
        ttft_p99=ttft.p99,
        tpot_p50=tpot.p50,
        tpot_p99=tpot.p99,
        error_percent=errors,
    )


def front(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The Pareto points, by falling first number: no other point is superior in both."""
    best = float("-inf")
    for x, y in sorted(set(points), reverse=True):
        if y > best:
            yield x, y
            best = y


def rates_of(text: str) -> tuple[float, ...]:
    """The value of --rates. Raises ConfigError."""
    try:
        rates: Sequence[float] = sorted({float(number) for number in text.split(",")})
    except ValueError:
        rates = ()
    if not rates or not 0.001 <= rates[0] <= rates[-1] <= 100_000:
        raise ConfigError.bad_value("--rates", text, "numbers from 0.001 to 100000 with commas between them")
    return tuple(rates)
