"""What lies in the current directory is data: no process that we start imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import UserDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.deployments import wait_until
from trtllm_disagg.common.interpreter import environment, python
from trtllm_disagg.engines.embedded.kv_transfer.transports import why_no_cma
from trtllm_disagg.engines.embedded.tensor_parallel.launch import core_launch
from trtllm_disagg.tools.up.orphan_reaper import MARK_VARIABLE, start_reaper, stop_reaper

#: What workers, frontends and engines import: ours, of the standard library, and of others.
PLANTED = ("yaml", "torch", "msgspec", "ctypes", "argparse", "prometheus_client", "uvloop", "sitecustomize")
WORKER = [*python("-m", "trtllm_disagg", "worker"), "--model", "/no/such/model"]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with modules that leave a trace when they are run, and end the process."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r}); 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Changing(UserDict[str, str]):
    """As os.environ is while another thread takes a variable away: its name is in the list, and no longer there."""

    def __iter__(self) -> Iterator[str]:
        yield "PYTEST_CURRENT_TEST"
        yield from super().__iter__()


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_modules_of_pythonpath_are_found(planted: Path) -> None:
    (mine := planted / "mine").mkdir()
    (mine / "my_plugin.py").write_text("print('mine')")
    assert run(python("-c", "import my_plugin"), PYTHONPATH=str(mine)).stdout == "mine\n"


@pytest.mark.parametrize("job", [{}, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_engine_core_starts_python_with_safe_path(job: dict[str, str]) -> None:
    assert core_launch(1, 1, job).command[:2] == (sys.executable, "-P")


def test_cma_self_test_runs_no_module_of_the_current_directory(planted: Path) -> None:
    why_no_cma()
    assert not (planted / "ran").exists()


@pytest.mark.parametrize(
    "command", [WORKER, [sys.executable, "-m", *WORKER[3:]]], ids=["as we start it", "python -m"]
)
def test_a_worker_runs_nothing_of_the_current_directory(planted: Path, command: list[str]) -> None:
    done = run(command)
    assert "error: " in done.stderr
    assert not (planted / "ran").exists()


def test_a_variable_that_is_taken_away_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", Changing(HOME="/root"))
    assert environment() == {"HOME": "/root"}


def test_the_reaper_starts_while_the_environment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", Changing())
    reaper = start_reaper("a mark", {"HOME": "/root", MARK_VARIABLE: "of the deployment around this one"})
    try:
        shown = Path(f"/proc/{reaper.pid}/environ")
        wait_until(lambda: shown.read_bytes() == b"HOME=/root\0", "the reaper runs with what it was given")
    finally:
        stop_reaper(reaper)
