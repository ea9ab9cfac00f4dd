"""Facts from the kernel about this machine and its processes, and the cores that a measurement may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from trtllm_disagg.errors import ConfigError


def two_cores() -> tuple[int, int]:
    """The first two cores of this process. Raises ConfigError if it has only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("bench: prefill and decode need a core each, and this process may use only one")
    return cores[0], cores[1]


def describe_machine() -> str:
    """`2 cores (AMD EPYC), 23 GiB`; no name of a host, a user or a path."""
    gib = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else "unknown CPU"
    return f"{len(os.sched_getaffinity(0))} cores ({cpu}), {gib:.0f} GiB"


def load() -> float:
    """Runnable processes, averaged over the last minute by the kernel; this benchmark's own are among them."""
    return os.getloadavg()[0]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
