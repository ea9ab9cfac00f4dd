"""Groups test files for pytest's processes (`pytest -n 3`), and orders them.

A file is never split, since its fixtures are made once, nor are files that share something expensive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.durations import file_of

#: Files that use the fixture `fleet`, so that each deployment starts once.
FLEET = (
    "tests/integration/test_bad_input.py",
    "tests/integration/test_cancel.py",
    "tests/integration/test_images.py",
    "tests/integration/test_metrics_pages.py",
    "tests/integration/test_split_is_real.py",
    "tests/integration/test_traces.py",
    "tests/parity/test_matrix.py",
    "tests/parity/test_asked_orders.py",
)
#: These begin last, and run alone on half of the processors.
UNRECORDED_SECONDS = 60.0
#: Folders with files that share engines, or check what mpich leaves in /dev/shm.
_TOGETHER = ("tests/conformance/", "tests/unit/engines/embedded/tensor_parallel/")


def group_of(file: str) -> str:
    if file in FLEET:
        return "fleet"
    return next((folder for folder in _TOGETHER if file.startswith(folder)), file)


def uses_fleet(item: pytest.Item) -> bool:
    return "fleet" in getattr(item, "fixturenames", ())


def in_order(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Put the longest groups first. `seconds`: by file; unrecorded files may be long."""
    for item in items:
        if uses_fleet(item) and file_of(item) not in FLEET:
            raise pytest.UsageError(f"{item.nodeid} uses the fleet: its file must be in FLEET of {__name__}")
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: addresses differ between processes; name the ids")
    lengths: defaultdict[str, float] = defaultdict(float)
    for file in {file_of(item) for item in items}:
        lengths[group_of(file)] += seconds.get(file, UNRECORDED_SECONDS)

    def place(item: pytest.Item) -> tuple[float, str, bool]:
        group = group_of(file_of(item))
        return -lengths[group], group, uses_fleet(item)

    items.sort(key=place)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each free process the next group, in the order of the tests."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])
