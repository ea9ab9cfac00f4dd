"""Retries failures once: a shared fixture at once; with `--second-try` each test after the run, one at a time.

About 400 tests run real processes on any machine. A second failure fails the run, and so do more than `MOST` retries.
Names each test that passed on its retry, as a bug to find.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

MOST = 5
#: The second run ends at the third failure.
_MAXFAIL = 3


class SecondTries:
    """A pytest plugin that collects first failures of this process and, under -n, of its workers."""

    def __init__(self) -> None:
        self._tests: dict[str, None] = {}
        self._shared: list[str] = []
        self._in_hand: set[str] = set()

    def shared(self, name: str, error: Exception) -> None:
        """Record a shared fixture that failed and is retried."""
        self._shared.append(f"{name}, after {type(error).__name__}: {error}")

    @property
    def needed(self) -> list[str]:
        return [*(text.partition("\n")[0] for text in self._shared), *self._tests]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        try:
            return (yield)
        except Exception as error:
            name = f"fixture {fixturedef.argname} of {request.node.nodeid or 'the session'}"
            if fixturedef.scope == "function" or name in self._in_hand:
                raise
            self.shared(name, error)
        self._in_hand.add(name)
        try:
            return request.config.hook.pytest_fixture_setup(fixturedef=fixturedef, request=request)
        finally:
            self._in_hand.remove(name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tests[report.nodeid] = None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["shared"] = self._shared

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._shared += getattr(node, "workeroutput", {}).get("shared", ())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._shared:
            terminalreporter.section("tried once more")
            terminalreporter.write_line("\n".join(self._shared))

    def conclude(self, code: int) -> int:
        """After a run with exit `code`: run failed tests once more, and name all retries."""
        print(
            f"{len(self.needed)} needed a second try, of at most {MOST}:",
            *self.needed,
            sep="\n  ",
            flush=True,
        )
        if self._tests:
            command = (sys.executable, "-m", "pytest", "-q", "-n", "0", f"--maxfail={_MAXFAIL}", *self._tests)
            if subprocess.run(command, check=False).returncode:
                return code
        print("all of it passed then: what is named above is not stable")
        return int(len(self.needed) > MOST)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-try", action="store_true", help="run failed tests once more; name them")


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Wraps the whole run, and each of xdist's processes."""
    tries = SecondTries()
    config.pluginmanager.register(tries, "second tries")
    code = yield
    ended = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if config.getoption("--second-try") and ended and tries.needed and not hasattr(config, "workerinput"):
        return tries.conclude(code)
    return code
