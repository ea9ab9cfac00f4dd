"""Too little room in /dev/shm is named before a process dies of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtllm_disagg.engines.embedded.kv_transfer import transports
from trtllm_disagg.engines.embedded.kv_transfer.transports import UCX_FREE, create_transport, lack_of_room
from trtllm_disagg.engines.embedded.tensor_parallel.launch import MPICH_PER_RANK, core_launch
from trtllm_disagg.errors import ConfigError

Leave = Callable[[int], None]
ADVICE = "start the container with --shm-size=256m, or: sudo mount -o remount,size=256m /dev/shm"


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    def leave(count: int) -> None:
        state = SimpleNamespace(f_bavail=count, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda directory: state)

    return leave


def test_a_directory_that_is_missing_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "DIRECTORY", tmp_path / "missing")
    assert lack_of_room(1, "UCX").startswith(f"{tmp_path}/missing has 0 MiB free")
    monkeypatch.setattr(transports, "DIRECTORY", tmp_path)
    assert lack_of_room(1, "UCX") == ""


def test_nixl_by_name_is_refused_where_ucx_has_no_room(leave: Leave) -> None:
    leave(16 << 20)
    with pytest.raises(ConfigError) as refused:
        create_transport("NIXL")
    assert "/dev/shm has 16 MiB free of the 17 MiB that UCX needs" in str(refused.value)
    assert ADVICE in str(refused.value)


def test_default_falls_back_where_ucx_has_no_room(leave: Leave, caplog: pytest.LogCaptureFixture) -> None:
    leave(UCX_FREE - 1)
    assert create_transport("DEFAULT").name == "SHARED_MEMORY"
    assert "NIXL needs more room" in caplog.text
    leave(UCX_FREE)
    assert create_transport("DEFAULT").name == "NIXL"


def test_ranks_are_refused_where_mpich_has_no_room(leave: Leave) -> None:
    leave(2 * MPICH_PER_RANK - 1)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 2 .* that mpich needs: .*--shm-size"):
        core_launch(2, 1, {})
    leave(2 * MPICH_PER_RANK)
    assert core_launch(2, 1, {}).by_mpiexec
