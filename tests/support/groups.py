"""Which files stay together in one of pytest's processes (`pytest -n 3`), and which begin first.

A file is never divided, for its fixtures are made once. Nor are files that share something dear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.durations import file_of

#: Files with tests that use the fixture `fleet`: each deployment of it is started once.
FLEET = (
    "tests/integration/test_bad_input.py",
    "tests/integration/test_cancel.py",
    "tests/integration/test_metrics_pages.py",
    "tests/integration/test_split_is_real.py",
    "tests/integration/test_traces.py",
    "tests/parity/test_matrix.py",
    "tests/parity/test_ways.py",
)
#: The last ones to begin run alone, on half of the processors.
UNRECORDED_SECONDS = 60.0
#: Folders with files that share engines, or that look for what mpich leaves in /dev/shm.
_TOGETHER = ("tests/conformance/", "tests/unit/engines/embedded/tensor_parallel/")


def group_of(file: str) -> str:
    if file in FLEET:
        return "fleet"
    return next((folder for folder in _TOGETHER if file.startswith(folder)), file)


def uses_fleet(item: pytest.Item) -> bool:
    return "fleet" in getattr(item, "fixturenames", ())


def in_order(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """The groups that take longest come first. `seconds` of each file; one that is not recorded may be long, too."""
    for item in items:
        if uses_fleet(item) and file_of(item) not in FLEET:
            raise pytest.UsageError(f"{item.nodeid} uses the fleet: its file must be in FLEET of {__name__}")
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: an address is another one in each process; name the ids")
    lengths: defaultdict[str, float] = defaultdict(float)
    for file in {file_of(item) for item in items}:
        lengths[group_of(file)] += seconds.get(file, UNRECORDED_SECONDS)

    def place(item: pytest.Item) -> tuple[float, str, bool]:
        group = group_of(file_of(item))
        return -lengths[group], group, uses_fleet(item)

    items.sort(key=place)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process that is done with a group the next one, in the order of the tests."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])
