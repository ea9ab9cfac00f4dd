"""Recorded durations of test files, which decide on the marker `fast`.

`pytest --record-durations` on the whole suite writes durations.json. A test is fast if it starts no process and its
file took at most `FAST_SECONDS` or is not recorded.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "durations.json"
FAST_SECONDS = 3.0
#: Tests with these fixtures or in these folders start processes.
_FIXTURES = {"embedded_llm", "fleet", "nats", "queue", "start_up"}
_FOLDERS = ("tests/integration", "tests/parity", "tests/gpu")


class DurationRecorder:
    """A pytest plugin: sums each file's seconds (setup, call, teardown) and writes them at the end."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        record = {file: round(seconds, 1) for file, seconds in sorted(self._seconds.items())}
        RECORD.write_text(json.dumps(record, indent=0) + "\n")


def file_of(item: pytest.Item) -> str:
    """The file's name in durations.json."""
    return item.path.relative_to(ROOT).as_posix()


def recorded_durations() -> dict[str, float]:
    """Seconds of each file; empty before the first recording."""
    seconds: dict[str, float] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return seconds


def mark_by_speed(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Add the markers `process` and `fast`."""
    for item in items:
        file = file_of(item)
        if file.startswith(_FOLDERS) or _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.process)
        if item.get_closest_marker("process") is None and seconds.get(file, 0.0) <= FAST_SECONDS:
            item.add_marker(pytest.mark.fast)
