"""Tiny checkpoints, written once, and deployments, started once, for all tests that use them."""

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
from tests.support.vision_models import write_vision_checkpoint

pytest_plugins = ["tests.support.second_try"]
Checkpoints = Callable[..., Path]
_FLEET = pytest.StashKey[Fleet]()
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def hear_signals() -> None:
    """Restore signals that `nohup` or a shell's `&` ignore: children inherit that, but tests stop them by signals."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restores signal handlers after a test: an interrupted command ignores signals until the process ends."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """checkpoints("llama") -> its directory."""
    torch = pytest.importorskip("torch")
    # As in the engine's process, so that sums are split alike.
    torch.set_num_threads(1)

    @functools.cache
    def checkpoint(family: str = "llama", seed: int = 0) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp(f"{family}-{seed}"), family, seed=seed)

    return checkpoint


@pytest.fixture(scope="session")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a checkpoint that takes images."""
    pytest.importorskip("torch").set_num_threads(1)
    return write_vision_checkpoint(tmp_path_factory.mktemp("llava"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write the seconds of every file to tests/durations.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    hear_signals()
    # Under -n only the controlling process sees every test.
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


# First, so that -m sees the markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark fast tests, and order all."""
    seconds = recorded_durations()
    mark_by_speed(items, seconds)
    in_order(items, seconds)


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """fleet["agg"] -> that deployment of the demo model, while the others load."""
    users = [item for item in request.session.items if uses_fleet(item)]
    params = [item.callspec.params for item in users if hasattr(item, "callspec")]
    wanted = {"agg", *(each["strategy"] for each in params if "strategy" in each)}
    tries: Any = request.config.pluginmanager.get_plugin("second tries")
    request.config.stash[_FLEET] = fleet = Fleet(tmp_path_factory.mktemp("fleet"), wanted, tries.shared)
    yield fleet
    fleet.close()


# Last, after the test's own fixtures.
@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the fleet after its last test: each process that watches discovery takes one of a user's 128 inotify
    instances.
    """
    is_last = uses_fleet(item) and (nextitem is None or not uses_fleet(nextitem))
    if is_last and (fleet := item.config.stash.get(_FLEET, None)) is not None:
        fleet.close()


@pytest.fixture
def deployed(fleet: Fleet, strategy: str) -> Served:
    """The deployment of the test's `strategy`."""
    return fleet[strategy]
