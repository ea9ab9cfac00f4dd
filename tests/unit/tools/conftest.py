"""What tests of several tools start."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.pages import Pages


@pytest.fixture
def pages() -> Iterator[Pages]:
    with Pages() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
