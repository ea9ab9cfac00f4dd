"""Checks that MPI can start a process, since TensorRT-LLM starts even a single rank by MPI_Comm_spawn. A child tries it
before the engine is built, where a failure has a name and a hang an end. It also shows whether MPI pins its process.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any

import msgspec

from trtllm_disagg.common.interpreter import python
from trtllm_disagg.engine.trtllm_version import installed_version
from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)

SECONDS = 60.0
SECONDS_OF_FINALIZE = 5
#: Set if a launcher started the ranks: TensorRT-LLM uses those.
_RANKS_ARE_THERE = ("TLLM_SPAWN_PROXY_PROCESS", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
_RANK = "from mpi4py import MPI; MPI.Comm.Get_parent().Disconnect()"
_MISSING = "No module named 'mpi4py'"
TWO_MPIS = (
    "mpich is installed beside TensorRT-LLM, which needs Open MPI, and no process can have both: pip uninstall mpich, "
    "or give the embedded engine (extra [mpi]) an environment of its own"
)


class MpiStart(msgspec.Struct, frozen=True):
    """A child's report on starting one process by MPI, as far as it got."""

    user: int = -1
    #: Its usable CPUs before and after loading MPI.
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    library: str = ""
    #: Its last output, or that it hung; empty for neither.
    failure: str = ""

    @classmethod
    def of(cls, said: str, hung: str = "") -> MpiStart:
        """`said`: the child's output, with MPI's own lines. `hung`: when it was killed."""
        facts: dict[str, Any] = {}
        words = "it ended without output"
        for line in filter(str.strip, said.splitlines()):
            try:
                facts |= json.loads(line)
            except (ValueError, TypeError):
                words = line
        return msgspec.convert(facts | {"failure": hung or ("" if "is_done" in facts else words)}, cls)

    @property
    def was_tried(self) -> bool:
        return _MISSING not in self.failure

    @property
    def problem(self) -> str:
        """One sentence with the remedy; empty if MPI does what TensorRT-LLM needs."""
        if not self.was_tried:
            return "mpi4py is not installed here, so MPI was not tried: TensorRT-LLM's requirements bring it"
        if self.failure and self.user == 0 and self.library.startswith("Open MPI v5"):
            return (
                f"{self.library} starts no process as root ({self.failure}): run as another user, as `dynamo` of "
                "NVIDIA's image (--user, runAsUser)"
            )
        if self.failure:
            return (
                f"MPI starts no process here ({self.library or 'import mpi4py'}: {self.failure}), so TensorRT-LLM can "
                "start no rank: repair it until `python -m trtllm_disagg.engine.mpi_start` ends with is_done"
            )
        if set(self.after) < set(self.before):
            return (
                f"{self.library} pins its process to CPUs {ranges(self.after)} of {ranges(self.before)}: set "
                "OMPI_MCA_hwloc_base_binding_policy=none (Open MPI 4) or PRTE_MCA_hwloc_default_binding_policy=none "
                "(5), or start it with mpirun --bind-to none"
            )
        return ""

    def __str__(self) -> str:
        cpus = f"CPUs {ranges(self.before)} before and {ranges(self.after)} after its import"
        return f"{self.library or 'no MPI'}, as uid {self.user}, {cpus}"


def ranges(cpus: tuple[int, ...]) -> str:
    """As the kernel writes them: 0-3,8."""
    starts = [cpu for cpu in sorted(cpus) if cpu - 1 not in cpus]
    ends = [cpu for cpu in sorted(cpus) if cpu + 1 not in cpus]
    spans = (str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return ",".join(spans) or "none"


def try_start(environ: Mapping[str, str], seconds: float = SECONDS) -> MpiStart:
    """Takes up to `seconds`, then kills the child's process group."""
    # A file, not a pipe: MPI's processes may hold it open longer.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        command = python("-m", __name__)
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environ, start_new_session=True
        )
        hung = ""
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            hung = f"no end after {seconds:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        return MpiStart.of(said.read(), hung)


def has_two_mpis() -> bool:
    """Whether both TensorRT-LLM's Open MPI and mpich are installed."""
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("mpich")) and installed_version() is not None
    return False


def require_start(engine_args: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raises ConfigError, before importing TensorRT-LLM, if it could start no rank."""
    if has_two_mpis():
        raise ConfigError(f"--engine tensorrt_llm: {TWO_MPIS}")
    without_mpi = engine_args.get("orchestrator_type") == "ray" or environ.get("TLLM_DISABLE_MPI") == "1"
    if installed_version() is None or without_mpi or any(map(environ.get, _RANKS_ARE_THERE)):
        return
    start = try_start(environ)
    log.info("MPI: %s", start)
    if start.was_tried and start.failure:
        raise ConfigError(f"--engine tensorrt_llm: {start.problem}")
    if start.problem:
        log.warning("%s", start.problem)


@contextmanager
def keeping_cpus() -> Iterator[None]:
    """An import in the block may pin this process: afterwards all its threads get their CPUs back."""
    before = os.sched_getaffinity(0)
    yield
    if os.sched_getaffinity(0) < before:
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), before)
        log.warning("the engine's import pinned this worker; restored its CPUs %s", ranges(tuple(before)))


class _Sigevent(ctypes.Structure):
    """The kernel's struct to run `function(value)` in a C library thread."""

    _fields_ = (
        ("value", ctypes.c_int64),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 40),
    )


def finalize(mpi: Any, status: int) -> None:
    """Call MPI.Finalize, which waits for every connected process; at the deadline this process ends with `status`.
    mpi4py holds Python's lock meanwhile, so no Python thread could end it.
    """
    libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
    exits = ctypes.cast(libc._exit, ctypes.c_void_p).value
    event = _Sigevent(value=status, notify=2, function=exits)  # SIGEV_THREAD
    libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer))  # CLOCK_MONOTONIC
    libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, SECONDS_OF_FINALIZE, 0), None)
    mpi.Finalize()


def _report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    _report(user=os.geteuid(), before=sorted(os.sched_getaffinity(0)))
    from mpi4py import MPI

    version = " ".join(MPI.Get_library_version().splitlines()[0].partition(", ")[0].split())
    _report(library=version, after=sorted(os.sched_getaffinity(0)))
    MPI.COMM_SELF.Spawn(sys.executable, ["-P", "-c", _RANK]).Disconnect()
    _report(is_done=True)
