"""Two engine cores that guide, of one checkpoint: shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.guiding import guiding_cores


@pytest.fixture(scope="module")
def cores(checkpoints: Checkpoints) -> Iterator[tuple[Core, Core]]:
    with guiding_cores(checkpoints()) as pair:
        yield pair


@pytest.fixture
def core(cores: tuple[Core, Core]) -> Iterator[Core]:
    yield cores[0]
    cores[0].assert_idle()
