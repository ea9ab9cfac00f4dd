"""Runs AIPerf, the load generator, and reads its results. No other module depends on AIPerf."""

from __future__ import annotations

import asyncio
import json
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
from typing import Any

import msgspec

from trtllm_disagg.errors import ConfigError, DisaggError

#: The version in our extra `[bench]`.
VERSION = "0.13.0"
_REMEDY = f"pip install 'trtllm-disagg[bench]' brings it, or aiperf=={VERSION} in any environment"
_EXPORT = "profile_export.jsonl"
#: The metric with the tokens of an answer, as the server counts them.
_TOKENS = "usage_completion_tokens"
#: The name of the tokenizer that AIPerf insists on, although it makes no prompts here.
_TOKENIZER = "local/none"
_LOG_LINES = 12
_KILLED_AFTER = 10.0


class LoadFailedError(DisaggError):
    """AIPerf ended without results."""


@dataclass(frozen=True, slots=True)
class Send:
    """A request and when it is sent, in the wall's seconds since the first one."""

    name: str
    at: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client saw of a request, on the wall's clock. Milliseconds; `begin_ns` and `end_ns` since the epoch."""

    name: str
    #: The id that the frontend writes into its log.
    request_id: str
    begin_ns: int
    end_ns: int
    latency_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    gaps_ms: tuple[float, ...]
    input_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    error: str | None


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

    def version(self) -> str:
        done = subprocess.run([self.executable, "--version"], capture_output=True, text=True, check=False)
        return done.stdout.strip().split()[-1] if done.returncode == 0 and done.stdout.strip() else "unknown"

    def argv(self, url: str, model: str, directory: Path, seconds: float) -> tuple[str, ...]:
        """`seconds`: the time limit of a request. Each request has its own connection: on one that is kept open, Linux
        delays the first token's packet by up to 40 ms.
        """
        return (
            *(str(self.executable), "profile", "--model", model, "--url", url),
            *("--endpoint-type", "completions", "--streaming", "--tokenizer", _TOKENIZER),
            *("--input-file", str(directory / "schedule.jsonl"), "--custom-dataset-type", "mooncake_trace"),
            *("--fixed-schedule", "--fixed-schedule-auto-offset", "--use-server-token-count"),
            *("--connection-reuse-strategy", "never", "--request-timeout-seconds", f"{seconds:.0f}"),
            *("--ui", "none", "--workers-max", "1", "--record-processors", "1"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(directory)),
        )

    async def run(self, sends: Sequence[Send], url: str, model: str, directory: Path, seconds: float) -> str:
        """Sends all requests, and leaves the results in `directory`. Returns the command. Raises LoadFailedError."""
        home = _prepare(directory, sends, model)
        argv = self.argv(url, model, directory, seconds)
        with (directory / "aiperf.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
                # Its child processes end with its process group.
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                await _end(process)
        # AIPerf also ends with 1 if no request was answered, and its log does not say why. The export does.
        needed = len(sends) if code != 0 else 0
        if not (directory / _EXPORT).is_file() or len(_records(directory)) < needed:
            text = (directory / "aiperf.log").read_text(errors="replace").splitlines()
            raise LoadFailedError(
                "\n  ".join([f"aiperf: exit code {code}; last lines:", *text[-_LOG_LINES:]])
            )
        return shlex.join(argv)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends AIPerf and all its child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _KILLED_AFTER)


def _prepare(directory: Path, sends: Iterable[Send], model: str) -> Path:
    """Writes AIPerf's input files. Returns the directory for HF_HOME."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    _write_schedule(sends, model, directory / "schedule.jsonl")
    return _tokenizer(directory / "hub")


def _write_schedule(sends: Iterable[Send], model: str, file: Path) -> None:
    """One line for each request: its body as AIPerf sends it, with token ids and a fixed number of output tokens."""
    with file.open("w", encoding="utf-8") as lines:
        for send in sends:
            payload = {
                "model": model,
                "prompt": send.prompt,
                "max_tokens": send.output_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            line = {"session_id": send.name, "timestamp": round(send.at * 1000), "payload": payload}
            lines.write(json.dumps(line) + "\n")


def _tokenizer(home: Path) -> Path:
    """Writes a tokenizer with one word in the layout of the hub's cache: AIPerf runs offline and tokenizes a book at
    its start, which would take a minute with the model's own tokenizer, for nothing.
    """
    repository = home / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (snapshot / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "?",
        "bos_token": "?",
        "eos_token": "?",
    }
    (snapshot / "tokenizer_config.json").write_text(json.dumps(config))
    return home


class _Metadata(msgspec.Struct, frozen=True):
    conversation_id: str
    x_request_id: str
    request_start_ns: int
    request_end_ns: int


class _Metric(msgspec.Struct, frozen=True):
    value: Any


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | None = None


class _Record(msgspec.Struct, frozen=True):
    metadata: _Metadata
    metrics: dict[str, _Metric] = {}
    error: _Error | None = None


def read_export(directory: Path) -> Iterator[Seen]:
    """All requests of a run, in the order in which they ended. Raises LoadFailedError for an unknown format."""
    for line in _records(directory):
        try:
            record = msgspec.json.decode(line, type=_Record)
        except msgspec.MsgspecError as error:
            raise LoadFailedError(
                f"aiperf: {_EXPORT} is not as version {VERSION} writes it: {error}"
            ) from error
        yield _seen(record)


def _records(directory: Path) -> list[bytes]:
    return (directory / _EXPORT).read_bytes().splitlines()


def _seen(record: _Record) -> Seen:
    told, metrics = record.metadata, _Values(record.metrics)
    wall = (told.request_end_ns - told.request_start_ns) / 1e6
    return Seen(
        name=told.conversation_id,
        request_id=told.x_request_id,
        begin_ns=told.request_start_ns,
        end_ns=told.request_end_ns,
        latency_ms=metrics.number("request_latency") or wall,
        ttft_ms=metrics.number("time_to_first_token"),
        tpot_ms=metrics.number("inter_token_latency"),
        gaps_ms=metrics.numbers("inter_chunk_latency"),
        input_tokens=metrics.count("usage_prompt_tokens"),
        output_tokens=metrics.count(_TOKENS) or 0,
        cached_tokens=metrics.count("usage_prompt_cache_read_tokens"),
        error=_error_of(record),
    )


def _error_of(record: _Record) -> str | None:
    """Without the number of its tokens, which comes last, an answer was cut off, or its TPOT is not known."""
    if record.error is not None:
        return f"{record.error.code}: {record.error.message}"
    return None if _TOKENS in record.metrics else "the answer ended without its usage"


@dataclass(frozen=True, slots=True)
class _Values:
    metrics: Mapping[str, _Metric]

    def number(self, name: str) -> float | None:
        metric = self.metrics.get(name)
        return None if metric is None else float(metric.value)

    def count(self, name: str) -> int | None:
        number = self.number(name)
        return None if number is None else round(number)

    def numbers(self, name: str) -> tuple[float, ...]:
        metric = self.metrics.get(name)
        return () if metric is None else tuple(map(float, metric.value))
