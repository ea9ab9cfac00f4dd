"""Looks at a deployment: all processes side by side, each with a deadline, so that one that is dead or frozen costs a
look that long at most, and shows as such.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from trtllm_disagg.admin.commands import Describe
from trtllm_disagg.config.settings import COMPONENTS, SHARED_COMPONENT
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.processes.reports import read_activity
from trtllm_disagg.tools.top.frontend import FrontendClient, Instance, environ_of_listener
from trtllm_disagg.tools.top.snapshot import (
    DEAD,
    EMPTY,
    SILENT,
    FrontendLoad,
    Histogram,
    Process,
    Snapshot,
    WorkerLoad,
)
from trtllm_disagg.tools.up.command_socket import NoUpError, send_to_up
from trtllm_disagg.tools.up.http import get
from trtllm_disagg.tools.up.plan import LOOPBACK, NO_WORKERS
from trtllm_disagg.tools.up.run_dir import PROCESSES_FILE, ProcessRecord, is_alive, read_processes

ANSWER_SECONDS = 2.0
_HTTP_OK = 200
#: A worker's own log lines of these levels.
_WARNING = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} (?:WARNING|ERROR) \S+: (.+)$")
_MOST_LOG_BYTES = 64 * 1024
_MOST_COUNTED = 2.0**63

#: Field of WorkerLoad -> the metric; the labels tell ranks, endpoints and reasons apart; the value is their sum.
_OF_WORKER = {
    "batch": "trtllm_disagg_requests_active",
    "queued": "trtllm_disagg_queued_requests",
    "kv_blocks": "dynamo_component_kvstats_active_blocks",
    "kv_blocks_total": "dynamo_component_kvstats_total_blocks",
    "handoffs_held": "trtllm_disagg_handoffs_held",
    "breakers_open": "trtllm_disagg_breakers_open",
    "prefill_tokens": "trtllm_disagg_prefill_tokens_total",
    "decode_tokens": "trtllm_disagg_decode_tokens_total",
    "requests_shed": "trtllm_disagg_requests_shed_total",
}
_REQUESTS = "trtllm_disagg_requests_total"
_RUNNING = "dynamo_frontend_inflight_requests"
_WAITING = "dynamo_frontend_queued_requests"
_DONE = "dynamo_frontend_requests_total"
_TTFT = "dynamo_frontend_time_to_first_token_seconds"
_ITL = "dynamo_frontend_inter_token_latency_seconds"

Samples = Mapping[str, list[Sample]]


def samples_of(page: str) -> Samples:
    """Samples by metric name; empty for text that is no metrics page."""
    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
    except ValueError:
        return {}
    return found


def load_of(page: str) -> WorkerLoad:
    samples = samples_of(page)
    ended = samples.get(_REQUESTS)
    fallbacks = None if ended is None else [each for each in ended if each.labels.get("fallback") != "none"]
    return WorkerLoad(
        **{name: _whole(samples.get(metric)) for name, metric in _OF_WORKER.items()},
        fallbacks=_whole(fallbacks),
    )


def frontend_of(page: str) -> FrontendLoad:
    samples = samples_of(page)
    return FrontendLoad(
        running=_whole(samples.get(_RUNNING)),
        waiting=_whole(samples.get(_WAITING)),
        requests=_whole(samples.get(_DONE)),
        ttft=_histogram(samples, _TTFT),
        itl=_histogram(samples, _ITL),
    )


def _whole(samples: Iterable[Sample] | None) -> int | None:
    """None for what is no count: a metric may be NaN, infinite, or any other float."""
    total = math.nan if samples is None else _sum(samples)
    return int(total) if abs(total) <= _MOST_COUNTED else None


def _sum(samples: Iterable[Sample]) -> float:
    return sum((sample.value for sample in samples), 0.0)


def _histogram(samples: Samples, metric: str) -> Histogram:
    """Added up over all models; empty where a bucket has no bound, or a number is none."""
    counts: dict[float, float] = {}
    try:
        for sample in samples.get(f"{metric}_bucket", ()):
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sample.value
    except (KeyError, ValueError):
        return EMPTY
    total = _sum(samples.get(f"{metric}_sum", ()))
    if any(map(math.isnan, counts)) or not all(map(math.isfinite, (*counts.values(), total))):
        return EMPTY
    return Histogram(tuple(sorted(counts.items())), total)


class Observer(Protocol):
    async def look(self) -> Snapshot: ...


def observer_of(run_dir: Path | None, url: str | None) -> Observer:
    """Raises ConfigError when there is no deployment."""
    if run_dir is None and url is not None:
        frontend = FrontendClient(url, ANSWER_SECONDS)
        frontend.models()
        run_dir = _run_dir_behind(frontend)
        if run_dir is None:
            return FrontendObserver(frontend)
    assert run_dir is not None
    if not (run_dir / PROCESSES_FILE).is_file():
        raise ConfigError.bad_value(
            "--run-dir", str(run_dir), f"the run directory of an `up`, with a {PROCESSES_FILE}"
        )
    return RunDirObserver(run_dir)


def _run_dir_behind(frontend: FrontendClient) -> Path | None:
    """Observes the deployment of an `up` of this user on this machine."""
    store = environ_of_listener(*frontend.address).get("DYN_FILE_KV")
    run_dir = Path(store).parent if store else None
    return run_dir if run_dir is not None and (run_dir / PROCESSES_FILE).is_file() else None


class RunDirObserver:
    """Everything: what `up` and the workers say of themselves, the system's word on each process, pages and logs."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._described: Mapping[str, Any] = {}
        self._logs = {path: path.stat().st_size for path in run_dir.glob("*.log")}

    async def look(self) -> Snapshot:
        records = await asyncio.to_thread(read_processes, self._run_dir)
        # First, because it says at which host the frontend listens.
        doubt = await self._ask_up()
        seen = await asyncio.gather(*(self._process(record) for record in records))
        pages = [page for record, (_, page) in zip(records, seen, strict=True) if record.role == "frontend"]
        warnings = await asyncio.to_thread(self._new_warnings)
        return Snapshot(
            time.time(),
            str(self._described.get("url", "")),
            str(self._described.get("model", "")),
            str(self._described.get("strategy", "")),
            doubt,
            tuple(process for process, _ in seen),
            frontend_of("".join(pages)),
            tuple(warnings),
        )

    async def _ask_up(self) -> str:
        """Why `up` gave no answer; empty when it did."""
        try:
            self._described = await asyncio.to_thread(
                send_to_up, self._run_dir, Describe(), seconds=ANSWER_SECONDS
            )
        except NoUpError:
            return "its `up` starts, stops or has ended"
        except (DisaggError, OSError) as error:
            return f"`up` does not answer: {error}"
        return ""

    async def _process(self, record: ProcessRecord) -> tuple[Process, str]:
        """A process, and its /metrics page."""
        seen = Process(record.name, record.role, record.state, record.pid or None)
        if record.state in ("planned", "restarting", "exited"):
            return seen, ""
        if not await asyncio.to_thread(is_alive, record):
            return replace(seen, state=DEAD), ""
        activity = await asyncio.to_thread(read_activity, self._run_dir / f"{record.name}.activity")
        seen = replace(seen, doing=str(activity))
        port = record.ports.get("http", record.ports.get("system"))
        if port is None or record.role == "nats":
            return seen, ""
        # The frontend's host is its user's choice, workers listen on loopback.
        url = self._described.get("url", "") if record.role == "frontend" else ""
        page = await _page(urlsplit(str(url)).hostname or LOOPBACK, port)
        if page is None:
            return replace(seen, state=SILENT if record.state == "ready" else record.state), ""
        return (seen if record.role in NO_WORKERS else replace(seen, load=load_of(page))), page

    def _new_warnings(self) -> list[str]:
        found = []
        for path in sorted(self._run_dir.glob("*.log")):
            with suppress(FileNotFoundError):  # a log moves when it is full
                lines = self._new_lines(path)
                found += [f"{path.stem}: {match[1]}" for line in lines if (match := _WARNING.match(line))]
        return found

    def _new_lines(self, path: Path) -> list[str]:
        begin, size = self._logs.get(path, 0), path.stat().st_size
        self._logs[path] = size
        with path.open("rb") as log:
            log.seek(max(begin if begin <= size else 0, size - _MOST_LOG_BYTES))
            return log.read(_MOST_LOG_BYTES).decode(errors="replace").splitlines()


class FrontendObserver:
    """Observes a deployment on another machine, through its frontend only; with several, by what all have measured."""

    def __init__(self, frontend: FrontendClient, *others: FrontendClient) -> None:
        self._frontend, self._all = frontend, (frontend, *others)

    async def look(self) -> Snapshot:
        try:
            async with asyncio.timeout(2 * ANSWER_SECONDS):
                instances = await asyncio.to_thread(self._frontend.instances)
                pages = await asyncio.gather(*(_page(*each.address) for each in self._all))
                models = await asyncio.to_thread(self._frontend.models)
        except (TimeoutError, ConfigError):
            instances, pages, models = None, [None], []
        doubt = "" if None not in pages else "the frontend does not answer"
        return Snapshot(
            time.time(),
            self._frontend.url,
            ", ".join(models),
            "",
            doubt,
            tuple(_workers_of(instances or [])),
            frontend_of("".join(filter(None, pages))),
        )


def _workers_of(instances: list[Instance]) -> list[Process]:
    """The workers, with their roles by the components at which peers or the frontend find them."""
    components: dict[int, set[str]] = {}
    for each in instances:
        if each.endpoint == "generate":
            components.setdefault(each.instance_id, set()).add(each.component)
    return [
        Process(f"{number:x}"[:10], _role(names), "listed") for number, names in sorted(components.items())
    ]


def _role(components: set[str]) -> str:
    """The role, by the components at which others find the worker: an agg worker has decode's, not the shared one."""
    if COMPONENTS[Role.PREFILL] in components:
        return Role.PREFILL.value
    return Role.DECODE.value if components >= {COMPONENTS[Role.DECODE], SHARED_COMPONENT} else "worker"


async def _page(host: str, port: int) -> str | None:
    """The body of the answer; None without an answer in time."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            status, body = await get(host, port, "/metrics")
    except TimeoutError:
        return None
    return body.decode(errors="replace") if status == _HTTP_OK else None
