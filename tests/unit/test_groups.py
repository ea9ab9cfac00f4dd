"""Which tests stay together under `pytest -n 3`."""

from __future__ import annotations

from importlib import metadata

import pytest

from tests.support.durations import ROOT
from tests.support.groups import FLEET, group_of


@pytest.mark.parametrize("file", FLEET)
def test_every_file_of_the_group_fleet_exists(file: str) -> None:
    """The other way round, collection fails: a test that uses the fleet from another file."""
    assert (ROOT / file).is_file()
    assert group_of(file) == "fleet"


def test_every_other_file_is_a_group_except_that_the_conformance_tests_share_their_engines() -> None:
    assert group_of("tests/unit/wire/test_wire.py") == "tests/unit/wire/test_wire.py"
    assert group_of("tests/conformance/test_answers.py") == group_of("tests/conformance/test_handoffs.py")


def test_no_plugin_of_dynamos_own_tests_leaves_out_files_of_ours(request: pytest.FixtureRequest) -> None:
    theirs = [
        each.name for each in metadata.entry_points(group="pytest11") if each.value.startswith("dynamo.")
    ]
    assert theirs
    assert [name for name in theirs if request.config.pluginmanager.has_plugin(name)] == []
