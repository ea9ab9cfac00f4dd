"""The room in /dev/shm.

Containers have 64 MiB of it by default. A process that exhausts it dies of a signal or fails at the first request,
without naming the cause. The needs below were measured with nixl-cu12 1.5.1 and mpich 5.0.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = Path("/dev/shm")
MIB = 1 << 20
#: With less than 16 MiB free, UCX starts without its shared memory and reaches no peer (with exactly 16 MiB it
#: crashes).
UCX_FREE = 17 * MIB
#: mpich maps 1034 KiB for each rank, and dies of SIGBUS if there is less.
MPICH_PER_RANK = 1_100_000


def free_bytes(directory: Path = DIRECTORY) -> int:
    """The free bytes of `directory`; zero if it does not exist."""
    try:
        state = os.statvfs(directory)
    except OSError:
        return 0
    return state.f_bavail * state.f_frsize


def how_to_get(needed: int) -> str:
    """How a user gets `needed` free bytes."""
    size = max(256, 2 * -(-needed // MIB))
    return (
        f"remove what is left in {DIRECTORY}, or start the container with --shm-size={size}m, or: "
        f"sudo mount -o remount,size={size}m {DIRECTORY}"
    )


def in_mib(count: int) -> str:
    return f"{count / MIB:.0f} MiB"
