"""What a run in several processes says while it runs: how far it is, every few seconds, and each failure at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

SECONDS = 10.0


class Progress:
    """A pytest plugin of the process that starts the others. In place of a letter for each test."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._began = clock()
        self._num_tests = 0
        self._num_ended = 0
        self._running: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="progress", daemon=True)

    def line(self) -> str:
        minutes, seconds = divmod(int(self._clock() - self._began), 60)
        if not self._num_tests:
            return f"{minutes}:{seconds:02} collecting tests"
        return f"{minutes}:{seconds:02} {self._num_ended} of {self._num_tests}; {', '.join(self._running)}"

    def pytest_sessionstart(self) -> None:
        self._thread.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._num_tests = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.append(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.remove(nodeid)
        self._num_ended += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say(f"FAILED {report.nodeid} ({report.when}): {_cause(report)}")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Any:
        category, _, word = yield
        return category, "", word

    def pytest_sessionfinish(self) -> None:
        self._over.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._over.wait(SECONDS):
            self._say(self.line())


def _cause(report: pytest.TestReport) -> str:
    """The first line of the error. The whole report comes only at the end, where a log may have been cut by then."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
    return text.partition("\n")[0]
