"""Where a measurement ran, in words, and which cores it may use."""

from __future__ import annotations

import os

from trtllm_disagg.errors import ConfigError


def two_cores() -> tuple[int, int]:
    """The first two cores of this process. Raises ConfigError on a machine with one: there is nothing to split."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("bench: prefill and decode need a core each, and this process may use only one")
    return cores[0], cores[1]


def describe_machine() -> str:
    """`2 cores (AMD EPYC), 23 GiB`; no name of a host, a user or a path."""
    with open("/proc/meminfo") as meminfo:
        gib = int(meminfo.readline().split()[1]) / (1 << 20)
    return f"{len(os.sched_getaffinity(0))} cores ({_cpu_model()}), {gib:.0f} GiB"


def load() -> float:
    """Runnable processes, averaged over the last minute by the kernel; this benchmark's own are among them."""
    return os.getloadavg()[0]


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown CPU"
