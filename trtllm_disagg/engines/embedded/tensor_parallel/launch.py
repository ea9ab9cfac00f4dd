"""Starts the engine core process: alone, as rank 0 of ranks that we start, or as a rank of an MPI job.

mpich's mpiexec starts the ranks, not MPI_Comm_spawn: spawned ranks do not share memory with rank 0, and if one dies,
mpich kills rank 0 before it can report the cause (decision 8).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from trtllm_disagg.common.interpreter import python
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import WAITING, environment_of, on_huge_pages
from trtllm_disagg.engines.embedded.kv_transfer.transports import lack_of_room
from trtllm_disagg.engines.embedded.params.model_config import read_json
from trtllm_disagg.errors import ConfigError

KEY = "tensor_parallel_size"
#: Numbers of config.json that must divide evenly among the ranks, and what they count.
_DIVIDED = {
    "num_key_value_heads": "KV heads",
    "num_attention_heads": "attention heads",
    "hidden_size": "hidden dimensions",
    "intermediate_size": "feed-forward dimensions",
    "moe_intermediate_size": "feed-forward dimensions of an expert",
    "shared_expert_intermediate_size": "feed-forward dimensions of the shared expert",
}
_CORE = ("-m", "trtllm_disagg.engines.embedded.core.core_process")
#: The core's argument in a job of an MPI launcher, where each rank has its own LLM object.
IN_JOB = "--in-job"
_EXTRA = "mpi4py and mpich (pip install 'trtllm-disagg[mpi]')"
#: oneDNN and torch cache about 0.2 MB per product and number of rows, by default 1024 entries each. A step needs a few,
#: and a new entry takes no measurable time.
_PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_KEPT_PRODUCTS = "64"
#: mpich's process manager starts the ranks on this host under any batch system, and leaves reporting a death to them.
_MPIEXEC_OPTIONS = (
    *("-disable-auto-cleanup", "-launcher", "fork", "-rmk", "user"),
    *("-localhost", "127.0.0.1", "-iface", "lo"),
)
#: mpich maps 1034 KiB per rank, and dies of SIGBUS with less.
MPICH_PER_RANK = 1_100_000
#: A shorter stop of a process is harmless.
_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 1.0


def require_divides(directory: Path, size: int) -> None:
    """Raises ConfigError without a model, or if its heads or dimensions do not divide evenly among `size` ranks.
    Imports nothing heavy.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError.bad_value("model", str(directory), "a directory with a config.json")
    config = read_json(directory / "config.json")
    for key, noun in _DIVIDED.items():
        count = config.get(key)
        if isinstance(count, int) and count % size:
            raise ConfigError.bad_value(
                KEY, size, f"a divisor of the model's {count} {noun} (config.json {key})"
            )


@dataclass(frozen=True, slots=True)
class Launch:
    command: tuple[str, ...]
    environment: dict[str, str]
    #: Inherited descriptors.
    pass_fds: tuple[int, ...] = ()
    by_mpiexec: bool = False

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process; it ends when its standard input, a pipe, closes."""
        return subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            # Only mpiexec writes there, how its ranks ended.
            stdout=subprocess.DEVNULL if self.by_mpiexec else None,
            env=self.environment,
            pass_fds=self.pass_fds,
            # Ctrl-C must not reach mpiexec, which would kill the ranks.
            start_new_session=self.by_mpiexec,
        )


class Job(NamedTuple):
    """The ranks that mpiexec or srun started."""

    rank: int
    size: int


def job_of(environment: Mapping[str, str]) -> Job | None:
    """This process's job, if any. Raises ConfigError for a launcher that mpich cannot join."""
    if "PMI_RANK" in environment and "PMI_SIZE" in environment:
        return Job(int(environment["PMI_RANK"]), int(environment["PMI_SIZE"]))
    for name, advice in (
        ("OMPI_COMM_WORLD_SIZE", "mpich's mpiexec, not Open MPI's"),
        ("SLURM_STEP_NUM_TASKS", "srun --mpi=pmi2"),
    ):
        if int(environment.get(name, "1")) > 1:
            raise ConfigError(f"started as one of {environment[name]} ranks ({name}); use {advice}")
    return None


def own_rank() -> int:
    """This process's rank; 0 outside a job. Works before MPI starts."""
    return int(os.environ.get("PMI_RANK", "0"))


def exit_with_parent(before: Callable[[], None] = lambda: None) -> None:
    """End this process, started by `Launch`, when the worker has ended."""

    def watch() -> None:
        # Not sys.stdin: its lock would block the interpreter's shutdown.
        while os.read(0, 4096):
            pass
        before()
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def require_ranks(size: int, environment: Mapping[str, str]) -> Job | None:
    """The job to join, if any. Raises ConfigError if its size differs, MPI is missing, or shared memory has no room."""
    job = job_of(environment)
    if job is not None and job.size != size:
        raise ConfigError.bad_value(
            KEY,
            size,
            f"{job.size}, the number of ranks that mpiexec or srun started "
            f"(start {size}, or start the worker without it)",
        )
    if size > 1 and (importlib.util.find_spec("mpi4py") is None or not mpiexec().is_file()):
        raise ConfigError.bad_value(KEY, size, f"1 without {_EXTRA}")
    if size > 1 and job is None and (lack := lack_of_room(size * MPICH_PER_RANK, "mpich")):
        raise ConfigError.bad_value(KEY, size, f"1 while {lack}")
    return job


def core_launch(size: int, num_threads: int, environment: Mapping[str, str]) -> Launch:
    """The engine core of `size` ranks. Raises ConfigError as `require_ranks`, and for an unknown CPU level."""
    job = require_ranks(size, environment)
    # Thread pools read these when they are loaded.
    environment = (
        dict(environment)
        | environment_of(environment)
        | on_huge_pages(environment)
        | WAITING
        | {
            "OMP_NUM_THREADS": str(num_threads),
            **{name: environment.get(name, _KEPT_PRODUCTS) for name in _PRODUCT_CACHES},
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            # A waiting rank yields the processor, first of all to the rank it waits for.
            "MPIR_CVAR_POLLS_BEFORE_YIELD": environment.get("MPIR_CVAR_POLLS_BEFORE_YIELD", "1"),
        }
    )
    if size == 1:
        return Launch(python(*_CORE), environment)
    if job is not None:
        # The core is the rank, so it gets the process manager's socket.
        fd = environment.get("PMI_FD")
        return Launch(python(*_CORE, IN_JOB), environment, () if fd is None else (int(fd),))
    command = (str(mpiexec()), *_MPIEXEC_OPTIONS, "-n", str(size), *python(*_CORE))
    return Launch(command, environment, by_mpiexec=True)


def serve_as_rank(size: int, num_threads: int, environment: Mapping[str, str]) -> bool:
    """On a job's ranks other than 0: serve rank 0's engine until it ends, then True. Call it on the main thread.

    False on rank 0 and without a job. Raises ConfigError as `require_ranks`.
    """
    job = require_ranks(size, environment)
    if job is None or job.rank == 0:
        return False
    # srun and mpiexec signal all ranks. Rank 0 needs the others to drain, and then ends them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with core_launch(size, num_threads, environment).start() as process:
        process.wait()
    return True


def mpiexec() -> Path:
    """The mpiexec installed beside mpi4py; one in PATH may belong to another MPI."""
    return Path(sysconfig.get_path("scripts")) / "mpiexec"


class RankWatch:
    """Finds stopped ranks (SIGSTOP, a frozen container), for which the others would wait for ever; and the rank that
    ended first, which mpiexec's exit code does not name. The worker polls it.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        """`pids`: all ranks, rank 0 first. A single rank is not watched: only its requests wait for it."""
        self._ranks: dict[int, psutil.Process] = {}
        self._open = contextlib.ExitStack()
        self._ends = self._open.enter_context(select.epoll())
        self._by_fd: dict[int, int] = {}
        for rank, pid in enumerate(pids if len(pids) > 1 else ()):
            # Its parent reports a process that is gone; some sandboxes lack pidfd_open.
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                self._ranks[rank] = psutil.Process(pid)
                self._await_end(rank, os.pidfd_open(pid))
        self._stopped_since: dict[int, float] = {}
        self._next_look = time.monotonic()

    def stopped_rank(self) -> str | None:
        """Names a rank that was stopped for too long, if any."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        for rank, process in self._ranks.items():
            if not _is_stopped(process):
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) >= _PATIENCE_SECONDS:
                return (
                    f"rank {rank} of the engine (process {process.pid}) "
                    f"has been stopped for {_PATIENCE_SECONDS:.0f} s"
                )
        return None

    def first_to_end(self) -> str | None:
        """Names the rank that died first, if any. Call it only once."""
        # The kernel reports deaths in order.
        for fd, _ in self._ends.poll(0, 1):
            rank = self._by_fd[fd]
            return death_of(rank, self._ranks[rank].pid)
        return None

    def kill(self) -> None:
        """Kill all ranks: a stopped process ignores other signals."""
        for process in self._ranks.values():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def close(self) -> None:
        self._open.close()

    def _await_end(self, rank: int, fd: int) -> None:
        self._open.callback(os.close, fd)
        self._by_fd[fd] = rank
        self._ends.register(fd, select.EPOLLIN)


def death_of(rank: int, pid: int) -> str:
    return f"rank {rank} of the engine (process {pid}) died"


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False
