"""What the frontend of an `up` did for a request, by its log: its spans go to a collector only, if there is one.

The lines are Dynamo's, as text or, with DYN_LOGGING_JSONL, as JSON. Where DYN_LOG leaves them out there are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from trtllm_disagg.processes.short_log import halves

_TIME = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")
# Of a line's request ids the first one is that which the workers have.
_REQUEST_ID = re.compile(rb'request_id"?[=:]"?([^\s",}]+)')
_ELAPSED = re.compile(rb'elapsed_ms"?[=:]"?(\d+)')
_CHOSEN, _COMPLETED = b"Selected worker", b"request completed"


class Stay(NamedTuple):
    """A request at the frontend, in nanoseconds since the epoch. `chosen`: its router had chosen the worker."""

    start: int
    chosen: int | None
    end: int


def read_stays(log: Path) -> Mapping[str, Stay]:
    """By request id; of requests that have ended, each to the millisecond. None where there is no such log."""
    chosen: dict[str, int] = {}
    stays: dict[str, Stay] = {}
    for half in halves(log):
        with half.open("rb") as lines:
            for line in lines:
                if _CHOSEN in line or _COMPLETED in line:
                    _read(line, chosen, stays)
    return stays


def _read(line: bytes, chosen: dict[str, int], stays: dict[str, Stay]) -> None:
    at, asked, elapsed = (each.search(line) for each in (_TIME, _REQUEST_ID, _ELAPSED))
    if at is None or asked is None:
        return
    moment, request_id = _nanoseconds(at[0]), asked[1].decode(errors="replace")
    if _CHOSEN in line:
        chosen.setdefault(request_id, moment)
    elif elapsed is not None:
        start, choice = moment - int(elapsed[1]) * 1_000_000, chosen.get(request_id)
        # Less than a millisecond is left out of what it says has elapsed.
        stays[request_id] = Stay(start if choice is None else min(start, choice), choice, moment)


def _nanoseconds(at: bytes) -> int:
    return round(datetime.fromisoformat(at.decode()).timestamp() * 1e6) * 1000
