"""The transports, the values of `cache_transceiver_config.backend`, and what NIXL requires of the machine."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from trtllm_disagg.common.interpreter import python
from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.kv_transfer.base import StagingTransport
from pathlib import Path

log = logging.getLogger(__name__)

_KEY = "cache_transceiver_config.backend"
NOT_BETWEEN_HOSTS = "the embedded engine moves KV within one host only; use TensorRT-LLM between hosts"


class TransportSpec(NamedTuple):
    #: `module:class`, imported when the transport is chosen.
    path: str
    #: TensorRT-LLM has a backend of this name.
    is_tensorrt_llms: bool = False
    #: Devices of the pools.
    devices: tuple[str, ...] = ("cpu",)


_PACKAGE = "trtllm_disagg.engines.embedded.kv_transfer"
#: By name, as configured.
TRANSPORTS = {
    "NIXL": TransportSpec(f"{_PACKAGE}.nixl:NixlTransport", is_tensorrt_llms=True, devices=("cpu", "cuda")),
    "SHARED_MEMORY": TransportSpec(f"{_PACKAGE}.shared_memory:SharedMemoryTransport"),
}


def backends() -> tuple[str, ...]:
    """The values of cache_transceiver_config.backend that the embedded engine accepts."""
    return ("DEFAULT", *TRANSPORTS)


def embedded_only_backends() -> tuple[str, ...]:
    """The `backends` that TensorRT-LLM does not have."""
    return tuple(name for name, spec in TRANSPORTS.items() if not spec.is_tensorrt_llms)


def on_gpus() -> tuple[str, ...]:
    return tuple(name for name, spec in TRANSPORTS.items() if "cuda" in spec.devices)


def create_transport(backend: str, *, needs_cma: bool = False) -> StagingTransport:
    """DEFAULT is NIXL, or shared memory if NIXL is not installed, has no room in /dev/shm or, with `needs_cma`, may
    not read other processes' memory. Raises ConfigError for an unknown name or a transport that would not work.
    """
    if backend not in backends():
        raise ConfigError.bad_value(_KEY, backend, f"one of {', '.join(backends())} on the embedded engine")
    name = "NIXL" if backend == "DEFAULT" else backend
    try:
        reason = _why_not_nixl(needs_cma) if name == "NIXL" else ""
        if not reason:
            return _create(name)
    except ImportError as error:
        remedy = _NIXL_REMEDY if name == "NIXL" else ""
        reason = f"a machine with {name} installed ({error}){remedy}"
    if backend == "DEFAULT":
        log.warning("KV moves through shared memory; NIXL needs %s", reason)
        return _create("SHARED_MEMORY")
    raise ConfigError.bad_value(_KEY, backend, reason)


def _create(name: str) -> StagingTransport:
    module, _, attribute = TRANSPORTS[name].path.partition(":")
    return cast("StagingTransport", getattr(import_module(module), attribute)())


DIRECTORY = Path("/dev/shm")
_MIB = 1 << 20
#: Below 16 MiB UCX starts without shared memory and reaches no peer; at exactly 16 MiB it crashes (nixl-cu12 1.5.1).
UCX_FREE = 17 * _MIB


def lack_of_room(needed: int, library: str) -> str:
    """Why /dev/shm is too small for a library, and the remedy; empty if `needed` bytes are free.

    Containers have 64 MiB by default. A process that exhausts it dies of a signal or fails at the first request,
    without naming the cause.
    """
    try:
        state = os.statvfs(DIRECTORY)
        free = state.f_bavail * state.f_frsize
    except OSError:  # it is not there
        free = 0
    if free >= needed:
        return ""
    size = max(256, 2 * -(-needed // _MIB))
    return (
        f"{DIRECTORY} has {free / _MIB:.0f} MiB free of the {needed / _MIB:.0f} MiB that {library} needs: remove stale "
        f"files, or start the container with --shm-size={size}m, or: "
        f"sudo mount -o remount,size={size}m {DIRECTORY}"
    )


# What NIXL needs: room in /dev/shm, and to read other processes' memory (CMA).


_CMA_NEEDED = (
    "a machine where processes of one user may read each other's memory (process_vm_readv: {}): set sysctl "
    "kernel.yama.ptrace_scope=0, or run containers with --cap-add SYS_PTRACE and one pid namespace; or set "
    "SHARED_MEMORY"
)
_NIXL_REMEDY = ": pip install nixl-cu13==1.5.1; or set SHARED_MEMORY"
_TIMEOUT_SECONDS = 20.0
_MARK = b"trtllm-disagg\0"

# The child reads the parent: Yama's ptrace_scope 1 allows the reverse, but workers are not each other's children.
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


def _why_not_nixl(needs_cma: bool) -> str:
    """What NIXL lacks on this machine; empty if it would work."""
    if lack := lack_of_room(UCX_FREE, "UCX"):
        return f"more room, as {lack}; or set SHARED_MEMORY"
    if needs_cma and (reason := why_no_cma()):
        return _CMA_NEEDED.format(reason)
    return ""


def why_no_cma() -> str:
    """The kernel's error if a test process cannot read this process's memory; else empty."""
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


# NIXL's packages: each is for one major version of CUDA.


#: By CUDA's major version.
_MODULES = {"12": "nixl_cu12", "13": "nixl_cu13"}


def nixl_api() -> Any:
    """NIXL's bindings, for torch's CUDA if installed, else any. Raises ImportError without any."""
    wanted = _MODULES.get(_cuda_of_torch())
    first, second = sorted(_MODULES.values(), key=lambda name: name != wanted)
    try:
        return import_module(f"{first}._api")
    except ImportError:
        return import_module(f"{second}._api")


def require_package_for_gpus(api: Any) -> None:
    """Raises ConfigError if these bindings do not match torch's CUDA: they would treat GPU memory as the CPU's."""
    wanted, found = _MODULES.get(_cuda_of_torch()), api.__name__.partition(".")[0]
    if wanted is None:
        raise ConfigError.bad_value(_KEY, "NIXL", f"torch for CUDA {' or '.join(_MODULES)} on a CUDA device")
    if found != wanted:
        package = wanted.replace("_", "-")
        raise ConfigError.bad_value(
            _KEY,
            "NIXL",
            f"{package} for torch's CUDA {_cuda_of_torch()} on a CUDA device, and {found} is what was found: "
            f"pip install {package}==1.5.1",
        )


def _cuda_of_torch() -> str:
    """The major version; empty without CUDA."""
    import torch

    return (torch.version.cuda or "").partition(".")[0]


# UCX's settings, used by NIXL. UCX must not listen on a network, since it authenticates nothing.


#: KV moves by the system call that reads another process (of the same user), all else through unnamed shared
#: memory. Nothing listens.
_UCX_TLS = {"cpu": "posix,cma,self", "cuda": "posix,cma,cuda_copy,cuda_ipc,self"}
#: UCX's only mode without tcp. Reads of a dead peer still fail, and a CMA read has ended when it returns.
UCX_ERROR_MODE = "none"
_TUNING = {
    "UCX_LOG_LEVEL": "error",
    # One system call per run of blocks, one round per request: a tenth less time.
    "UCX_CMA_SEG_SIZE": "16m",
    "UCX_CMA_TX_QUOTA": "inf",
    # Without NVLink, UCX would read another process's GPU memory through the CPU: hundreds of times slower
    # within one GPU.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}


def ucx_settings(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """UCX's variables. The user's values win unless they would open this host's memory to other users."""
    safe, chosen = _UCX_TLS[device], environ.get("UCX_TLS")
    if chosen is not None and not set(chosen.split(",")) <= set(safe.split(",")):
        log.warning(
            "UCX_TLS=%s is not used: KV moves by UCX_TLS=%s, which opens no port (SECURITY.md)", chosen, safe
        )
    return {name: environ.get(name, value) for name, value in _TUNING.items()} | {"UCX_TLS": safe}


@contextlib.contextmanager
def ucx_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables while an agent is made: UCX reads them then."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
