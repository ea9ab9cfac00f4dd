"""How the engine core process is started: alone, as rank 0 of ranks that we start, or as a rank of an MPI job.

The ranks of tensor parallelism are started with mpich's mpiexec rather than by MPI_Comm_spawn: spawned ranks do not
share memory with rank 0, and when one of them dies, mpich kills rank 0 before it could say why (decision 8).
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

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import WAITING, environment_of, on_huge_pages
from trtllm_disagg.engines.embedded.kv_transfer.transports import lack_of_room
from trtllm_disagg.engines.embedded.params.model_config import read_json
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.interpreter import python

KEY = "tensor_parallel_size"
#: Numbers of config.json that every rank gets an equal part of, and what they count.
_DIVIDED = {
    "num_key_value_heads": "KV heads",
    "num_attention_heads": "attention heads",
    "hidden_size": "hidden dimensions",
    "intermediate_size": "feed-forward dimensions",
    "moe_intermediate_size": "feed-forward dimensions of an expert",
    "shared_expert_intermediate_size": "feed-forward dimensions of the shared expert",
}
_CORE = ("-m", "trtllm_disagg.engines.embedded.core.core_process")
#: An argument of the core: the ranks were started by an MPI launcher, and each has its own LLM object.
IN_JOB = "--in-job"
_EXTRA = "mpi4py and mpich (pip install 'trtllm-disagg[mpi]')"
#: oneDNN and torch cache some 0.2 MB per product and number of rows, which varies from step to step. A step needs a
#: handful of entries, and making one takes no measurable time; by default each cache keeps 1024.
_PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_KEPT_PRODUCTS = "64"
#: For mpich's process manager: it starts the ranks on this host in any batch system, and leaves it to the ranks to
#: notice and report a death.
_MPIEXEC_OPTIONS = (
    *("-disable-auto-cleanup", "-launcher", "fork", "-rmk", "user"),
    *("-localhost", "127.0.0.1", "-iface", "lo"),
)
#: mpich maps 1034 KiB for each rank, and dies of SIGBUS if there is less.
MPICH_PER_RANK = 1_100_000
#: A process that was stopped for a shorter time does no harm.
_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 1.0


def require_divides(directory: Path, size: int) -> None:
    """Asked before anything is built; nothing heavy is imported. Raises ConfigError when the heads or dimensions of the
    model cannot be shared out evenly among `size` ranks, or when there is no model.
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
    #: Descriptors that the process inherits.
    pass_fds: tuple[int, ...] = ()
    by_mpiexec: bool = False

    def start(self) -> subprocess.Popen[bytes]:
        """Its standard input is a pipe: when that closes, the process ends."""
        return subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            # mpiexec writes there how its ranks ended; the ranks write nothing.
            stdout=subprocess.DEVNULL if self.by_mpiexec else None,
            env=self.environment,
            pass_fds=self.pass_fds,
            # Ctrl-C at the terminal must not reach mpiexec, which would kill the ranks.
            start_new_session=self.by_mpiexec,
        )


class Job(NamedTuple):
    """mpiexec or srun started us as one of several ranks."""

    rank: int
    size: int


def job_of(environment: Mapping[str, str]) -> Job | None:
    """The job that this process is a rank of. Raises ConfigError for a launcher that mpich cannot join."""
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
    """0 for rank 0, and for a process that is no rank of anything. MPI need not have started."""
    return int(os.environ.get("PMI_RANK", "0"))


def exit_with_parent(before: Callable[[], None] = lambda: None) -> None:
    """End this process, which `Launch` has started, when the worker has ended for any reason."""

    def watch() -> None:
        # Not sys.stdin: its lock would block the interpreter's shutdown.
        while os.read(0, 4096):
            pass
        before()
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def require_ranks(size: int, environment: Mapping[str, str]) -> Job | None:
    """The job to join; None when there is none. Raises ConfigError for one of another size, without MPI, or without
    room for its shared memory.
    """
    job = job_of(environment)
    if job is not None and job.size != size:
        raise ConfigError.bad_value(
            KEY,
            size,
            f"{job.size}, the number of ranks that mpiexec or srun has started "
            f"(start {size}, or start the worker without it)",
        )
    if size > 1 and (importlib.util.find_spec("mpi4py") is None or not mpiexec().is_file()):
        raise ConfigError.bad_value(KEY, size, f"1 without {_EXTRA}")
    if size > 1 and job is None and (lack := lack_of_room(size * MPICH_PER_RANK, "mpich")):
        raise ConfigError.bad_value(KEY, size, f"1 while {lack}")
    return job


def core_launch(size: int, num_threads: int, environment: Mapping[str, str]) -> Launch:
    """The engine core of `size` ranks. Raises ConfigError as `require_ranks`, and for a CPU level that there is not."""
    job = require_ranks(size, environment)
    # Thread pools read these once, when they are loaded.
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
            # A rank that waits for another one lets others run, that one first of all.
            "MPIR_CVAR_POLLS_BEFORE_YIELD": environment.get("MPIR_CVAR_POLLS_BEFORE_YIELD", "1"),
        }
    )
    if size == 1:
        return Launch(python(*_CORE), environment)
    if job is not None:
        # The way to the process manager goes to the core, which is the rank.
        fd = environment.get("PMI_FD")
        return Launch(python(*_CORE, IN_JOB), environment, () if fd is None else (int(fd),))
    command = (str(mpiexec()), *_MPIEXEC_OPTIONS, "-n", str(size), *python(*_CORE))
    return Launch(command, environment, by_mpiexec=True)


def serve_as_rank(size: int, num_threads: int, environment: Mapping[str, str]) -> bool:
    """In a job, on every rank but rank 0: take part in its engine until that ends, then True. From the main thread.

    False on rank 0, and where there is no job. Raises ConfigError as `require_ranks`.
    """
    job = require_ranks(size, environment)
    if job is None or job.rank == 0:
        return False
    # srun and mpiexec tell all ranks to stop. Rank 0 then drains, for which it needs the others, and ends them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with core_launch(size, num_threads, environment).start() as process:
        process.wait()
    return True


def mpiexec() -> Path:
    """mpiexec of the mpich that is installed beside mpi4py; one found in PATH may belong to another MPI."""
    return Path(sysconfig.get_path("scripts")) / "mpiexec"


class RankWatch:
    """Finds ranks that were stopped (SIGSTOP, a frozen container): they are alive, but the others would wait for them
    for ever. Also finds which rank ended first: mpiexec then ends the others, and its exit code does not name it. The
    worker calls this from time to time.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        """`pids` of all ranks, rank 0 first. A single rank is not watched: only its own requests wait for it."""
        self._ranks: dict[int, psutil.Process] = {}
        self._open = contextlib.ExitStack()
        self._ends = self._open.enter_context(select.epoll())
        self._by_fd: dict[int, int] = {}
        for rank, pid in enumerate(pids if len(pids) > 1 else ()):
            # Its own parent reports one that is gone; and there are sandboxes without pidfd_open.
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                self._ranks[rank] = psutil.Process(pid)
                self._await_end(rank, os.pidfd_open(pid))
        self._stopped_since: dict[int, float] = {}
        self._next_look = time.monotonic()

    def stopped_rank(self) -> str | None:
        """Names a rank that has been stopped for too long; None without one."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        for rank, process in self._ranks.items():
            if not _is_stopped(process):
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) >= _PATIENCE_SECONDS:
                return (
                    f"rank {rank} of the engine (process {process.pid}) was stopped, "
                    f"and has not gone on for {_PATIENCE_SECONDS:.0f} s"
                )
        return None

    def first_to_end(self) -> str | None:
        """Names the rank that died first; None when none has. Must be called only once."""
        # The kernel reports the deaths in their order.
        for fd, _ in self._ends.poll(0, 1):
            rank = self._by_fd[fd]
            return death_of(rank, self._ranks[rank].pid)
        return None

    def kill(self) -> None:
        """A stopped process ends in no other way."""
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
