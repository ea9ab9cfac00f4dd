"""Does MPI start a process here? TensorRT-LLM starts even the rank of one GPU by MPI_Comm_spawn. So a child tries that
before the engine is built, where a failure has a name and a hang an end. It also shows whether MPI pins its process.
"""

from __future__ import annotations

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

from trtllm_disagg.engine.trtllm_version import installed_version
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.interpreter import python

log = logging.getLogger(__name__)

SECONDS = 60.0
#: Of a process whose ranks a launcher has started: TensorRT-LLM takes those.
_RANKS_ARE_THERE = ("TLLM_SPAWN_PROXY_PROCESS", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
_RANK = "from mpi4py import MPI; MPI.Comm.Get_parent().Disconnect()"
_MISSING = "No module named 'mpi4py'"
TWO_MPIS = (
    "mpich is installed beside TensorRT-LLM, which needs Open MPI, and no process can have both: pip uninstall mpich, "
    "or give the embedded engine (extra [mpi]) an environment of its own"
)


class MpiStart(msgspec.Struct, frozen=True):
    """What a child told that started one process by MPI, as far as it came."""

    user: int = -1
    #: The CPUs that it could use before and after it had loaded MPI.
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    library: str = ""
    #: Its last words, or that it hung; empty for neither.
    failure: str = ""

    @classmethod
    def of(cls, said: str, hung: str = "") -> MpiStart:
        """`said`: the child's output, in which MPI has lines of its own. `hung`: after how long it was ended."""
        facts: dict[str, Any] = {}
        words = "it ended without a word"
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
        """One sentence with what to do; empty where MPI does what TensorRT-LLM needs."""
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
    """0-3,8; as the kernel writes it."""
    starts = [cpu for cpu in sorted(cpus) if cpu - 1 not in cpus]
    ends = [cpu for cpu in sorted(cpus) if cpu + 1 not in cpus]
    spans = (str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return ",".join(spans) or "none"


def try_start(environ: Mapping[str, str], seconds: float = SECONDS) -> MpiStart:
    """Takes up to `seconds`, and ends what is left of the child's process group."""
    # A file, no pipe: what MPI starts may hold it open for longer.
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
    """Open MPI of the installed TensorRT-LLM, and mpich."""
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("mpich")) and installed_version() is not None
    return False


def require_start(engine_args: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raises ConfigError where the installed TensorRT-LLM could start no rank. Its import comes later."""
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
    """An import inside may pin this process: all its threads then get their CPUs back, and what they start has them."""
    before = os.sched_getaffinity(0)
    yield
    if os.sched_getaffinity(0) < before:
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), before)
        log.warning("the engine's import pinned this worker; it has its CPUs %s again", ranges(tuple(before)))


def _tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    _tell(user=os.geteuid(), before=sorted(os.sched_getaffinity(0)))
    from mpi4py import MPI

    version = " ".join(MPI.Get_library_version().splitlines()[0].partition(", ")[0].split())
    _tell(library=version, after=sorted(os.sched_getaffinity(0)))
    MPI.COMM_SELF.Spawn(sys.executable, ["-P", "-c", _RANK]).Disconnect()
    _tell(is_done=True)
