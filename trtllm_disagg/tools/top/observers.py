"""Observes a deployment: reads all processes at once, each with a deadline, and shows dead and frozen ones as such."""

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

from trtllm_disagg.common.reports import read_activity
from trtllm_disagg.config.settings import COMPONENTS, SHARED_COMPONENT
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError, DisaggError
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
from trtllm_disagg.tools.up.commands import Describe
from trtllm_disagg.tools.up.http import get
from trtllm_disagg.tools.up.look import described
from trtllm_disagg.tools.up.plan import LOOPBACK, NO_WORKERS
from trtllm_disagg.tools.up.run_dir import PROCESSES_FILE, ProcessRecord, is_alive, read_processes

ANSWER_SECONDS = 2.0
_HTTP_OK = 200
#: Warnings and errors in a worker's log.
_WARNING = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} (?:WARNING|ERROR) \S+: (.+)$")
_MAX_LOG_BYTES = 64 * 1024
_MAX_COUNTED = 2.0**63

#: Field of WorkerLoad -> metric. The value is the sum over all labels (ranks, endpoints, reasons).
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
    """Samples by metric name; empty for an invalid page."""
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
    """None if the sum is no count: metrics can be NaN, infinite or any float."""
    total = math.nan if samples is None else _sum(samples)
    return int(total) if abs(total) <= _MAX_COUNTED else None


def _sum(samples: Iterable[Sample]) -> float:
    return sum((sample.value for sample in samples), 0.0)


def _histogram(samples: Samples, metric: str) -> Histogram:
    """Sums over all models; empty if a bucket has no bound or a number is invalid."""
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
    """Raises ConfigError without a deployment."""
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
    """The run directory of this user's `up` on this machine, by its frontend."""
    store = environ_of_listener(*frontend.address).get("DYN_FILE_KV")
    run_dir = Path(store).parent if store else None
    return run_dir if run_dir is not None and (run_dir / PROCESSES_FILE).is_file() else None


class RunDirObserver:
    """Observes processes, their pages and logs, and what `up` and the workers report."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._described: Mapping[str, Any] = {}
        self._logs = {path: path.stat().st_size for path in run_dir.glob("*.log")}

    async def look(self) -> Snapshot:
        records = await asyncio.to_thread(read_processes, self._run_dir)
        # First, since it names the frontend's host.
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
        """Returns why `up` gave no answer; empty if it did."""
        try:
            self._described = await asyncio.to_thread(
                send_to_up, self._run_dir, Describe(), deadline=ANSWER_SECONDS
            )
        except NoUpError:
            return "`up` is starting, stopping or gone"
        except (DisaggError, OSError) as error:
            return f"`up` does not answer: {error}"
        return ""

    async def _process(self, record: ProcessRecord) -> tuple[Process, str]:
        """Returns a process and its /metrics page."""
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
        # Workers listen on loopback; the user chooses the frontend's host.
        url = self._described.get("url", "") if record.role == "frontend" else ""
        page, instance = await asyncio.gather(
            _page(urlsplit(str(url)).hostname or LOOPBACK, port), self._instance(record, port)
        )
        seen = replace(seen, instance=instance)
        if page is None:
            return replace(seen, state=SILENT if record.state == "ready" else record.state), ""
        return (seen if record.role in NO_WORKERS else replace(seen, load=load_of(page))), page

    async def _instance(self, record: ProcessRecord, port: int) -> str | None:
        if record.role in NO_WORKERS:
            return None
        with suppress(OSError):
            return found.instance if (found := await described(port)) else None
        return None

    def _new_warnings(self) -> list[str]:
        found = []
        for path in sorted(self._run_dir.glob("*.log")):
            with suppress(FileNotFoundError):  # a full log moves
                lines = self._new_lines(path)
                found += [f"{path.stem}: {match[1]}" for line in lines if (match := _WARNING.match(line))]
        return found

    def _new_lines(self, path: Path) -> list[str]:
        begin, size = self._logs.get(path, 0), path.stat().st_size
        self._logs[path] = size
        with path.open("rb") as log:
            log.seek(max(begin if begin <= size else 0, size - _MAX_LOG_BYTES))
            return log.read(_MAX_LOG_BYTES).decode(errors="replace").splitlines()


class FrontendObserver:
    """Observes a deployment on another machine, by its frontend only; with several, by the sum of their metrics."""

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
    """The workers, with roles from their components in discovery."""
    components: dict[int, set[str]] = {}
    for each in instances:
        if each.endpoint == "generate":
            components.setdefault(each.instance_id, set()).add(each.component)
    return [
        Process(f"{number:x}"[:10], _role(names), "listed", instance=f"{number:x}")
        for number, names in sorted(components.items())
    ]


def _role(components: set[str]) -> str:
    """The role by components: an agg worker has decode's component, but not the shared one."""
    if COMPONENTS[Role.PREFILL] in components:
        return Role.PREFILL.value
    return Role.DECODE.value if components >= {COMPONENTS[Role.DECODE], SHARED_COMPONENT} else "worker"


async def _page(host: str, port: int) -> str | None:
    """The metrics page; None without an answer in time."""
    status, body = await get(host, port, "/metrics")
    return body.decode(errors="replace") if status == _HTTP_OK else None
