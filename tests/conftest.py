"""Tiny checkpoints, written once for all tests; deployments, started once for all that ask for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.deployments import Fleet, Served
from tests.support.durations import DurationRecorder, mark_by_speed
from tests.support.models import write_checkpoint

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """checkpoints("llama") -> its directory."""
    import torch

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
    if config.getoption("--record-durations"):
        config.pluginmanager.register(DurationRecorder())


# First, so that -m sees the markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use the fleet come last.

    Its deployments stay to the end, and every process that watches a discovery directory takes from the 128
    inotify instances that Linux gives a user.
    """
    mark_by_speed(items)
    items.sort(key=uses_fleet)


def uses_fleet(item: pytest.Item) -> bool:
    return "fleet" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """fleet["agg"] -> that deployment of the demo model; the others load meanwhile."""
    users = [item for item in request.session.items if uses_fleet(item)]
    params = [item.callspec.params for item in users if hasattr(item, "callspec")]
    wanted = {"agg", *(each["strategy"] for each in params if "strategy" in each)}
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), wanted)
    yield fleet
    fleet.close()


@pytest.fixture
def deployed(fleet: Fleet, strategy: str) -> Served:
    """The deployment of the strategy that the test is parametrised with."""
    return fleet[strategy]
