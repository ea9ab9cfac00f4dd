"""Reads from the workers' logs (handlers/trace.py) where the time of requests went, and from the workers' metrics how
far this machine was behind the GPUs that it models.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request

from prometheus_client.parser import text_string_to_metric_families

from trtllm_disagg.processes.direct_http import open_url
from trtllm_disagg.processes.short_log import halves
from trtllm_disagg.tools.bench.strategies.measures import QUANTITIES
from trtllm_disagg.tools.bench.strategies.records import Arm, Parts, RequestRecord

#: The frontend's log line that joins the request id of the workers with that of the client.
_NAMES = re.compile(r"request completed request_id=(\S+) .*?x_request_id=\"([^\"]+)\"")

#: What begins a request's line in a worker's log; older workers wrote "journal ".
_REQUEST_TRACE = re.compile(r": (?:request_trace|journal) (\{.*)")
#: Metrics of a worker (dynamo_runtime/metrics.py).
_STEPS, _LATE = "trtllm_disagg_modelled_steps_total", "trtllm_disagg_modelled_late_seconds_total"


class EngineTimes(NamedTuple):
    """When one engine did what for one request: seconds of the modelled clock, which all engines of a machine share."""

    arrival: float
    scheduled: float
    first_token: float
    last_token: float
    transfer_start: float
    transfer_end: float

    @classmethod
    def of(cls, told: Mapping[str, float]) -> EngineTimes:
        arrival = told.get("arrival_time", 0.0)
        scheduled = told.get("first_scheduled_time", arrival)
        first = told.get("first_token_time", scheduled)
        start = told.get("kv_cache_transfer_start", 0.0)
        return cls(
            *(arrival, scheduled, first, told.get("last_token_time", first)),
            *(start, told.get("kv_cache_transfer_end", start)),
        )


def parts_of(engines: Sequence[EngineTimes]) -> Parts | None:
    """The parts of a request's time, from the times of the engines that it passed through; None if one is missing."""
    decodes = [times for times in engines if times.transfer_start]
    prefills = [times for times in engines if not times.transfer_start]
    if not prefills or len(decodes) > 1:
        return None
    # Where a prefill was done again on another worker, the last one counts and the earlier ones are waiting time.
    prefills.sort()
    prefill = prefills[-1]
    queue = prefill.scheduled - prefills[0].arrival
    work = prefill.first_token - prefill.scheduled
    if not decodes:
        return _milliseconds(queue, work, 0.0, 0.0, 0.0, prefill.last_token - prefill.first_token)
    decode = decodes[0]
    return _milliseconds(
        queue,
        work,
        decode.arrival - prefill.first_token,
        decode.transfer_end - max(decode.transfer_start, prefill.first_token),
        decode.transfer_start - decode.arrival,
        decode.last_token - decode.transfer_end,
    )


def _milliseconds(*seconds: float) -> Parts:
    queue, prefill, handoff, transfer, decode_wait, decode = (max(0.0, each) * 1000 for each in seconds)
    return Parts(queue, prefill, handoff, transfer, decode_wait, decode)


class RequestLogs:
    """The logs of a frontend and its workers, read once after their requests have ended."""

    def __init__(self, frontend: Path, workers: Iterable[Path]) -> None:
        self._names = {theirs: ours for text in _texts(frontend) for ours, theirs in _NAMES.findall(text)}
        self._engines: defaultdict[str, list[EngineTimes]] = defaultdict(list)
        for log in workers:
            self._read(log)

    def parts(self, request_id: str) -> Parts | None:
        """`request_id`: the id that the client gave the request."""
        return parts_of(self._engines.get(self._names.get(request_id, ""), ()))

    def _read(self, log: Path) -> None:
        for line in (line for text in _texts(log) for line in text.splitlines()):
            if not (found := _REQUEST_TRACE.search(line)):
                continue
            entry = json.loads(found[1])
            if times := entry.get("engine"):
                self._engines[entry["request"]].append(EngineTimes.of(times))


def _texts(log: Path) -> Iterator[str]:
    return (half.read_text(errors="replace") for half in halves(log))


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late the steps of one worker ended since its start, in modelled seconds."""

    steps: float = 0.0
    late_seconds: float = 0.0

    def since(self, before: Lateness) -> float:
        """Milliseconds by which a step ended too late, on average."""
        steps = self.steps - before.steps
        return (self.late_seconds - before.late_seconds) / steps * 1000 if steps else 0.0


def lateness_of(port: int) -> Lateness:
    """The lateness of the worker with its system server on `port`."""
    with open_url(Request(f"http://127.0.0.1:{port}/metrics"), 10) as answer:
        text = answer.read().decode()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return Lateness(totals.get(_STEPS, 0.0), totals.get(_LATE, 0.0))


def software_share(requests: Sequence[RequestRecord], arm: Arm, late_ms: float) -> dict[str, float]:
    """The share of each time measured by clients that no modelled GPU or link took: time beyond the modelled parts,
    handoffs between workers, and late steps. Empty where no request has parts.
    """
    known = [(request, request.parts) for request in requests if request.parts and request.error is None]
    if not known:
        return {}
    sums: defaultdict[str, float] = defaultdict(float)
    for request, parts in known:
        before = parts.before_first_token(arm.waits_for_decode)
        if request.ttft_ms is not None:
            sums["ttft"] += request.ttft_ms
            sums["ttft modelled"] += before
        if request.tpot_ms is not None and request.ttft_ms is not None:
            sums["tpot"] += request.latency_ms - request.ttft_ms
            sums["tpot modelled"] += parts.modelled - before
        sums["latency"] += request.latency_ms
        sums["latency modelled"] += parts.modelled
    late = late_ms * len(known)
    return {
        time: min(1.0, (abs(sums[time] - sums[f"{time} modelled"]) + late) / sums[time])
        for time in QUANTITIES
        if sums[time]
    }
