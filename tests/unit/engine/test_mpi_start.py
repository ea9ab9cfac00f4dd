"""The child that starts one process by MPI: with the MPI of this environment, and as bad ones end."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from importlib.util import find_spec
from pathlib import Path

import msgspec
import packaging
import pytest

from tests.support.deployments import ROOT
from tests.support.packages import install
from trtllm_disagg.engine.mpi_start import MpiStart, keeping_cpus, try_start

pytestmark = pytest.mark.process

BEFORE = '{"user": %d, "before": [0, 1, 2, 3, 8]}\n'
OPEN_MPI_5 = '{"library": "Open MPI v5.0.10rc2", "after": [0, 1, 2, 3, 8]}\n'
PINNED = '{"library": "Open MPI v4.1.9a1", "after": [2]}\n{"is_done": true}\n'
NOISE = "[node:1] PMIX ERROR in file dpm.c at line 2141\n"
UNKNOWN = "mpi4py.MPI.Exception: MPI_ERR_UNKNOWN: unknown error\n"
#: mpi4py.MPI that starts nothing, and one that binds its process to a CPU as it is imported.
STARTS_NOTHING = """
def Get_library_version(): return "Open MPI v4.1.9a1, package: Open MPI"
class COMM_SELF:
    def Spawn(*_): raise OSError("MPI_ERR_SPAWN: could not spawn processes")
"""
PINS = """
import os, types
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def Get_library_version(): return "Open MPI v4.1.9a1, package: Open MPI"
class COMM_SELF:
    def Spawn(*_): return types.SimpleNamespace(Disconnect=lambda: None)
"""


@pytest.mark.parametrize(
    ("said", "hung", "told"),
    [
        (BEFORE % 0 + OPEN_MPI_5 + NOISE + UNKNOWN, "", "as root (mpi4py.MPI.Exception: MPI_ERR_UNKNOWN"),
        (
            BEFORE % 0 + OPEN_MPI_5,
            "no end after 60 s",
            "starts no process as root (no end after 60 s): run as",
        ),
        (BEFORE % 1000 + OPEN_MPI_5 + UNKNOWN, "", "no process here (Open MPI v5.0.10rc2: mpi4py.MPI.Exce"),
        (BEFORE % 1000 + "libmpi.so.40: cannot open\n", "", "here (import mpi4py: libmpi.so.40: cannot"),
        (BEFORE % 1000 + OPEN_MPI_5, "", "it ended without output"),
        (BEFORE % 1000 + PINNED, "", "pins its process to CPUs 2 of 0-3,8: set OMPI_MCA_hwloc_base_binding"),
        (BEFORE % 0 + "ModuleNotFoundError: No module named 'mpi4py'\n", "", "mpi4py is not installed here"),
    ],
    ids=["root fails", "root hangs", "another user", "no library", "killed", "pinned", "no mpi4py"],
)
def test_each_bad_outcome_is_one_sentence_with_what_to_do(said: str, hung: str, told: str) -> None:
    problem = MpiStart.of(said, hung).problem
    assert told in problem
    assert "\n" not in problem


def test_a_start_that_went_well_has_no_problem_and_tells_library_user_and_cpus() -> None:
    start = MpiStart.of(NOISE + BEFORE % 1000 + OPEN_MPI_5 + '{"is_done": true}\n')
    assert start.problem == ""
    assert str(start) == "Open MPI v5.0.10rc2, as uid 1000, CPUs 0-3,8 before and 0-3,8 after its import"


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="the extra mpi is not installed")
def test_mpich_starts_a_process_here_and_without_its_launcher_it_is_ended_after_the_deadline() -> None:
    scripts = sysconfig.get_path("scripts")
    start = try_start({**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"})
    assert (start.problem, start.user) == ("", os.geteuid())
    assert start.library.startswith("MPICH")
    assert start.before == start.after == tuple(sorted(os.sched_getaffinity(0)))
    assert "no end after 2 s" in try_start({**os.environ, "PATH": "/nowhere"}, seconds=2.0).problem


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of processes that see TensorRT-LLM as far as its metadata goes, an MPI that starts nothing, and no mpich."""
    for needed in (msgspec, packaging):
        (tmp_path / needed.__name__).symlink_to(Path(str(needed.__file__)).parent)
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text(STARTS_NOTHING)
    install(tmp_path, "tensorrt_llm")
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}", "FOLDER": str(tmp_path)}


def required(environ: dict[str, str], engine_args: str = "{}") -> str:
    """What a worker says of its MPI; empty where it did not try it."""
    program = (
        "import logging, os; from trtllm_disagg.engine.mpi_start import require_start; "
        f"logging.basicConfig(level=0, format='%(message)s'); require_start({engine_args}, os.environ)"
    )
    command = [sys.executable, "-S", "-P", "-c", program]
    return subprocess.run(command, env=environ, capture_output=True, text=True).stderr


def test_a_worker_is_refused_where_mpi_starts_nothing(environ: dict[str, str]) -> None:
    *_, last = required(environ).splitlines()
    assert last.startswith("trtllm_disagg.errors.ConfigError: --engine tensorrt_llm: ")
    assert "Open MPI v4.1.9a1" in last
    assert "MPI_ERR_SPAWN" in last


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one CPU cannot be taken away")
def test_a_worker_that_mpi_pins_says_so_and_goes_on(environ: dict[str, str]) -> None:
    (Path(environ["FOLDER"]) / "mpi4py" / "MPI.py").write_text(PINS)
    told, warned = required(environ).splitlines()
    assert told.startswith("MPI: Open MPI v4.1.9a1, as uid ")
    assert warned.startswith("Open MPI v4.1.9a1 pins its process to CPUs ")


@pytest.mark.parametrize(
    ("more", "engine_args"),
    [
        ({"TLLM_SPAWN_PROXY_PROCESS": "1"}, "{}"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "{}"),
        ({"TLLM_DISABLE_MPI": "1"}, "{}"),
        ({}, "{'orchestrator_type': 'ray'}"),
    ],
    ids=["its launcher", "mpirun", "no MPI", "ray"],
)
def test_nothing_is_tried_where_tensorrt_llm_starts_no_rank_by_mpi(
    environ: dict[str, str], more: dict[str, str], engine_args: str
) -> None:
    assert required(environ | more, engine_args) == ""


def test_mpich_beside_tensorrt_llm_is_refused_before_anything_is_tried(environ: dict[str, str]) -> None:
    install(Path(environ["FOLDER"]), "mpich")
    *_, last = required(environ).splitlines()
    assert "--engine tensorrt_llm: mpich is installed beside TensorRT-LLM" in last
    assert "pip uninstall mpich" in last


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one CPU cannot be taken away")
def test_an_import_that_pins_leaves_every_thread_its_cpus(caplog: pytest.LogCaptureFixture) -> None:
    cpus, go_on = os.sched_getaffinity(0), threading.Event()
    with keeping_cpus():
        os.sched_setaffinity(0, {min(cpus)})
        thread = threading.Thread(target=go_on.wait)
        thread.start()
    threads = [os.sched_getaffinity(each) for each in (0, thread.native_id or 0)]
    go_on.set()
    thread.join()
    assert threads == [cpus, cpus]
    assert "import pinned this worker" in caplog.text
