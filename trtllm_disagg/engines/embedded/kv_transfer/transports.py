"""The list of transports, and which of them `cache_transceiver_config.backend` means.

A transport can be configured once it has an entry in `_SPECS`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from trtllm_disagg.engines.embedded.kv_transfer.access import Network, OneHost, TransferScope
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.dev_shm import DIRECTORY, UCX_FREE, free_bytes, how_to_get, in_mib
from trtllm_disagg.processes.interpreter import python
from trtllm_disagg.processes.limits import has_rdma

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.kv_transfer.base import StagingTransport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportSpec:
    name: str
    #: `module:class`, imported when the transport is chosen; its argument is the scope.
    path: str
    #: The scopes that it supports.
    scopes: tuple[type[TransferScope], ...]
    #: TensorRT-LLM has a backend of this name, too.
    is_tensorrt_llms: bool = False
    #: Where the pools may be that it moves KV between.
    devices: tuple[str, ...] = ("cpu",)


_SPECS = (
    TransportSpec(
        "NIXL",
        "trtllm_disagg.engines.embedded.kv_transfer.nixl:NixlTransport",
        (OneHost, Network),
        is_tensorrt_llms=True,
        devices=("cpu", "cuda"),
    ),
    TransportSpec(
        "SHARED_MEMORY",
        "trtllm_disagg.engines.embedded.kv_transfer.shared_memory:SharedMemoryTransport",
        (OneHost,),
    ),
    TransportSpec("TLS", "trtllm_disagg.engines.embedded.kv_transfer.tls:TlsTransport", (Network,)),
)
TRANSPORTS = {spec.name: spec for spec in _SPECS}


def backends() -> tuple[str, ...]:
    """The values of cache_transceiver_config.backend that the embedded engine accepts."""
    return ("DEFAULT", *TRANSPORTS)


def embedded_only_backends() -> tuple[str, ...]:
    """The `backends` that TensorRT-LLM does not have."""
    return tuple(name for name, spec in TRANSPORTS.items() if not spec.is_tensorrt_llms)


def on_one_host() -> tuple[str, ...]:
    return tuple(name for name, spec in TRANSPORTS.items() if OneHost in spec.scopes)


def on_gpus() -> tuple[str, ...]:
    return tuple(name for name, spec in TRANSPORTS.items() if "cuda" in spec.devices)


_CMA_NEEDED = (
    "a machine where processes of one user may read each other's memory (process_vm_readv: {}): set sysctl "
    "kernel.yama.ptrace_scope=0, or run containers with --cap-add SYS_PTRACE and one pid namespace; or set "
    "SHARED_MEMORY for workers on one host"
)
_ROOM_NEEDED = f"more room ({{}}): {how_to_get(UCX_FREE)}; or set SHARED_MEMORY for workers on one host"
_NIXL_REMEDY = ": pip install nixl-cu13==1.5.1; or set SHARED_MEMORY for workers on one host"
_KEY = "cache_transceiver_config.backend"
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


def create_transport(
    backend: str, scope: TransferScope, *, needs_cma: bool = False, on_gpu: bool = False
) -> StagingTransport:
    """DEFAULT means on one host NIXL, or shared memory where NIXL is not installed, has no room in /dev/shm or may not
    read other processes' memory, which `needs_cma` asks for; between hosts TLS, or NIXL for a GPU's memory or where
    there is RDMA. Raises ConfigError for any other name, and where a transport would not work.
    """
    if backend not in backends():
        raise ConfigError.bad_value(_KEY, backend, f"one of {', '.join(backends())} on the embedded engine")
    is_default = backend == "DEFAULT"
    if is_default and isinstance(scope, Network) and not on_gpu and not has_rdma():
        return _create("TLS", scope)
    name = "NIXL" if is_default else backend
    try:
        reason = _why_not(name, scope, needs_cma)
        if not reason:
            return _create(name, scope)
    except ImportError as error:
        remedy = _NIXL_REMEDY if name == "NIXL" else ""
        reason = f"a machine on which {name} is installed ({error}){remedy}"
    if is_default and isinstance(scope, OneHost):
        log.warning("KV moves through shared memory, on this host only; NIXL needs %s", reason)
        return _create("SHARED_MEMORY", scope)
    raise ConfigError.bad_value(_KEY, backend, reason)


def _why_not(name: str, scope: TransferScope, needs_cma: bool) -> str:
    """What that transport needs and does not have here; empty when it would work."""
    if name != "NIXL":
        return ""
    free = free_bytes()
    # Between hosts UCX does without.
    if isinstance(scope, OneHost) and free < UCX_FREE:
        free_now = f"{DIRECTORY} has {in_mib(free)} free of the {in_mib(UCX_FREE)} that UCX asks for"
        return _ROOM_NEEDED.format(free_now)
    if needs_cma and (reason := why_no_cma()):
        return _CMA_NEEDED.format(reason)
    return ""


def _create(name: str, scope: TransferScope) -> StagingTransport:
    module, _, attribute = TRANSPORTS[name].path.partition(":")
    return cast("StagingTransport", getattr(import_module(module), attribute)(scope))


def why_no_cma() -> str:
    """Empty when another process could read this process's memory in a test; else the kernel's error."""
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


def needs_cma(scope: TransferScope, device: str) -> bool:
    """Workers on one host move KV by CMA (process_vm_readv), except for a GPU's memory."""
    return device == "cpu" and isinstance(scope, OneHost)
