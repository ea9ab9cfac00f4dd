"""Tiny checkpoints, written once for all tests; deployments, started once for all that ask for them."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import Fleet, Served
from tests.support.durations import DurationRecorder, mark_by_speed, recorded_durations
from tests.support.groups import GroupScheduling, in_order, uses_fleet
from tests.support.models import write_checkpoint

pytest_plugins = ["tests.support.second_try"]
Checkpoints = Callable[..., Path]
_FLEET = pytest.StashKey[Fleet]()
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def hear_signals() -> None:
    """What tests start is told to stop by signals. `nohup` and a shell's `&` have a run ignore some, and all that it
    starts with it.
    """
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """After a test signals are taken as before it. A command that was interrupted ignores them until its end, and in a
    test this process goes on.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """checkpoints("llama") -> its directory."""
    torch = pytest.importorskip("torch")
    # As the engine's own process runs; sums are split the same way everywhere.
    torch.set_num_threads(1)

    @functools.cache
    def checkpoint(family: str = "llama", seed: int = 0) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp(f"{family}-{seed}"), family, seed=seed)

    return checkpoint


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write the seconds of every file to tests/durations.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    hear_signals()
    # Of several processes under -n, the one that started the others hears of every test.
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


# First, so that -m sees the markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is fast, and put the tests in order."""
    seconds = recorded_durations()
    mark_by_speed(items, seconds)
    in_order(items, seconds)


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """fleet["agg"] -> that deployment of the demo model; the others load meanwhile."""
    users = [item for item in request.session.items if uses_fleet(item)]
    params = [item.callspec.params for item in users if hasattr(item, "callspec")]
    wanted = {"agg", *(each["strategy"] for each in params if "strategy" in each)}
    tries: Any = request.config.pluginmanager.get_plugin("second tries")
    request.config.stash[_FLEET] = fleet = Fleet(tmp_path_factory.mktemp("fleet"), wanted, tries.shared)
    yield fleet
    fleet.close()


# Last, when the fixtures of the test itself have ended.
@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The fleet ends with the last test that uses it.

    Every process that watches a discovery directory takes from the 128 inotify instances that Linux gives a user.
    """
    is_last = uses_fleet(item) and (nextitem is None or not uses_fleet(nextitem))
    if is_last and (fleet := item.config.stash.get(_FLEET, None)) is not None:
        fleet.close()


@pytest.fixture
def deployed(fleet: Fleet, strategy: str) -> Served:
    """The deployment of the strategy that the test is parametrised with."""
    return fleet[strategy]
