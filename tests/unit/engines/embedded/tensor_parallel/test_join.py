"""The leader of a rank dies while MPI starts: nothing in Python runs then, and it ends all the same."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")
MPIEXEC = str(Path(sysconfig.get_path("scripts")) / "mpiexec")
#: Rank 0 is gone before MPI has started; rank 1 waits for it in there.
JOIN = """
import os
from trtllm_disagg.engines.embedded.tensor_parallel import group as join
join._JOIN_SECONDS = 1.0
if join.own_rank():
    join.join_as_follower()
"""


@pytest.fixture
def tidy() -> Iterator[None]:
    """mpich's memory, which no process could remove: the one that knew its name was in the middle of making it."""
    before = set(SHARED.glob("mpich_shm_*"))
    yield
    for path in set(SHARED.glob("mpich_shm_*")) - before:
        if not any(str(path) in mapped for mapped in all_maps()):
            path.unlink(missing_ok=True)


def all_maps() -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            yield maps.read_text()


@pytest.mark.usefixtures("tidy")
def test_rank_without_its_leader_ends_within_the_join_timeout() -> None:
    command = [MPIEXEC, "-disable-auto-cleanup", "-n", "2", sys.executable, "-c", JOIN]
    done = subprocess.run(command, capture_output=True, timeout=40)
    assert done.returncode != 0
