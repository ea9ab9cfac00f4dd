"""UCX's settings, beneath NIXL. On one host UCX must not listen on a network: it checks nothing there."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping

import psutil

from trtllm_disagg.engines.embedded.kv_transfer.access import OneHost, TransferScope

log = logging.getLogger(__name__)

#: KV by the system call that reads another process (the kernel asks for the same user), all else through shared
#: memory that has no name. Nothing listens.
_ONE_HOST = {"cpu": "posix,cma,self", "cuda": "posix,cma,cuda_copy,cuda_ipc,self"}
_TUNING = {
    "UCX_LOG_LEVEL": "error",
    # A whole run of blocks in one system call, and all of a request's in one round: a tenth less time.
    "UCX_CMA_SEG_SIZE": "16m",
    "UCX_CMA_TX_QUOTA": "inf",
    # Where it sees no NVLink, UCX would read another process's GPU memory through the CPU's: within one GPU
    # hundreds of times slower. A decode worker reads.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}


def ucx_error_mode(scope: TransferScope) -> str:
    """UCX's error handling mode. Without tcp UCX has `none` only; a read of a dead peer fails all the same, and a read
    by CMA has ended when it returns.
    """
    return "none" if isinstance(scope, OneHost) else "peer"


def ucx_settings(scope: TransferScope, device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """UCX's variables. The user's own values win, unless they would open this host's memory to other users."""
    tuning = {name: environ.get(name, value) for name, value in _TUNING.items()}
    chosen = environ.get("UCX_TLS")
    if isinstance(scope, OneHost):
        safe = _ONE_HOST[device]
        if chosen is not None and not set(chosen.split(",")) <= set(safe.split(",")):
            log.warning(
                "UCX_TLS=%s is not used: on one host KV moves by UCX_TLS=%s, which opens no port (SECURITY.md)",
                chosen,
                safe,
            )
        return tuning | {"UCX_TLS": safe}
    if chosen is not None:
        return tuning
    between = {"UCX_NET_DEVICES": device_name} if (device_name := _device_of(scope.host)) else {}
    # For a GPU's memory UCX itself chooses best.
    return tuning | between | ({"UCX_TLS": "cma,tcp"} if device == "cpu" else {})


@contextlib.contextmanager
def ucx_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables while an agent is made, which is when UCX reads them."""
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


def _device_of(host: str) -> str:
    """The network device that has this address; empty when there is none."""
    try:
        wanted = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in wanted for address in addresses):
            return name
    return ""
