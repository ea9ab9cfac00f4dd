"""May processes of this machine read each other's memory? NIXL's fast way on one host (CMA) depends on it."""

from __future__ import annotations

import ctypes
import os
import subprocess

from trtllm_disagg.interpreter import python
from trtllm_disagg.kv_transfer.reach import OneHost, Reach

_TIMEOUT_SECONDS = 20.0
_MARK = b"trtllm-disagg\0"

# Not a child's memory: Yama's ptrace_scope 1 allows that, and workers are no children of each other.
_READ_PARENT = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
size = {len(_MARK)}
buffer = ctypes.create_string_buffer(size)
mine, theirs = iovec(ctypes.addressof(buffer), size), iovec(int(sys.argv[2]), size)
count = libc.process_vm_readv(
    int(sys.argv[1]), ctypes.byref(mine), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0)
)
print(os.strerror(ctypes.get_errno()) if count != size else "" if buffer.raw == {_MARK!r} else "read other bytes")
"""


def why_no_cma() -> str:
    """Empty when another process could read this one's memory just now; else what the kernel said."""
    mark = ctypes.create_string_buffer(_MARK, len(_MARK))
    command = python("-S", "-E", "-c", _READ_PARENT, str(os.getpid()), str(ctypes.addressof(mark)))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"the self-test failed: {error}"
    return done.stdout.strip()


def is_needed(reach: Reach, device: str) -> bool:
    """Workers on one host move KV by CMA; a GPU's memory goes other ways."""
    return device == "cpu" and isinstance(reach, OneHost)
