"""Room in /dev/shm. Containers have 64 MiB of it unless told otherwise, and what meets its end there dies of a signal
or fails at the first request, without a word about it.

The KV pool needs none: its memory has no name. What needs it, measured with nixl-cu12 1.5.1 and mpich 5.0:
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = Path("/dev/shm")
MIB = 1 << 20
#: UCX starts without its shared memory, and then reaches no peer, unless more than 16 MiB are free (with 16 MiB to the
#: byte it crashes); it keeps 4.2 MiB of them.
UCX_FREE, UCX_KEPT = 17 * MIB, 4_500_000
#: mpich maps 1034 KiB a rank, and dies of SIGBUS where they are not there.
MPICH_PER_RANK = 1_100_000


def free_bytes(directory: Path = DIRECTORY) -> int:
    """Zero where there is no such directory."""
    try:
        state = os.statvfs(directory)
    except OSError:
        return 0
    return state.f_bavail * state.f_frsize


def how_to_get(needed: int) -> str:
    """Of what is to be free."""
    size = max(256, 2 * -(-needed // MIB))
    return (
        f"remove what is left in {DIRECTORY}, or start the container with --shm-size={size}m, or: "
        f"sudo mount -o remount,size={size}m {DIRECTORY}"
    )


def in_mib(count: int) -> str:
    return f"{count / MIB:.0f} MiB"
