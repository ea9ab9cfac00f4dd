"""NIXL transport: READs and WRITEs a peer's registered memory (UCX: cma on one host, tcp between hosts; nixl.py).

The rules here are measured, not taste: progress thread off (it spins), strict locking, reads
never on an event loop, metadata added once per peer, re-added only after the old one was removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import psutil
import torch

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.access import OneHost, TransferScope
from trtllm_disagg.kv_transfer.base import PeerMetadata, ReadTimeoutError
from trtllm_disagg.kv_transfer.host import new_memory, own_mark
from trtllm_disagg.kv_transfer.nixl_memory import (
    LateNixlTransfer,
    NixlAddress,
    NixlStaging,
    address_of,
    block_table,
)

# What UCX under NIXL may use. On one host it must not listen on a network: it checks nothing there.


log = logging.getLogger(__name__)

#: KV by the system call that reads another process (the kernel asks for the same user), all else through shared
#: memory that has no name. Nothing listens.
_ONE_HOST = {"cpu": "posix,cma,self", "cuda": "posix,cma,cuda_copy,cuda_ipc,self"}
_TUNING = {
    "UCX_LOG_LEVEL": "error",
    # A whole run of blocks in one system call, and all of a request's in one round: a tenth less time.
    "UCX_CMA_SEG_SIZE": "16m",
    "UCX_CMA_TX_QUOTA": "inf",
}


def error_mode(scope: TransferScope) -> str:
    """Without tcp UCX offers none but `none`: a read of a dead peer is an error all the same, and a read by CMA has
    ended when it returns.
    """
    return "none" if isinstance(scope, OneHost) else "peer"


def settings(scope: TransferScope, device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """UCX's variables. The user's own go first, except for what would open this host's memory to other users."""
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
    # What a GPU's memory takes, UCX chooses best by itself.
    return tuning | between | ({"UCX_TLS": "cma,tcp"} if device == "cpu" else {})


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """UCX reads its variables when an agent is made."""
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
    """The network device that has this address; empty when it cannot be told."""
    try:
        wanted = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in wanted for address in addresses):
            return name
    return ""


_POLL_SECONDS = 0.0002
_DOING = {"READ": "reading KV from", "WRITE": "writing KV to"}


@dataclass(slots=True)
class _Remote:
    agent: str
    table: Any  # NIXL prepared descriptor list of the peer's whole pool
    address: NixlAddress


class NixlTransport:
    name = "NIXL"

    def __init__(self, scope: TransferScope) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # read when the first agent is made
        # Import errors are the caller's to handle: DEFAULT falls back to shared memory, NIXL does not.
        from nixl_cu12 import _api

        self._api = _api
        self._reach = scope
        self._name = ""
        self._agent: Any = None
        self._registration: Any = None
        self._pool: torch.Tensor | None = None
        self._local: Any = None
        self._remotes: dict[str, _Remote] = {}
        self._staging: NixlStaging | None = None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._pool = new_memory(shape, dtype, device)
        return self._pool

    def serve(self, sender: str) -> bytes:
        assert self._pool is not None
        config = self._api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._name = sender
        self._agent = self._api.nixl_agent(sender, config)
        with environment(settings(self._reach, self._pool.device.type, os.environ)):
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": error_mode(self._reach)})
        base, nbytes = self._pool.data_ptr(), self._pool.nbytes
        self._registration = self._agent.register_memory([(base, nbytes, self._device, "")], self._memory)
        self._local = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self._table(base, self._pool.shape[0]), self._memory
        )
        self._staging = NixlStaging(self._agent)
        process = own_mark() if isinstance(self._reach, OneHost) else None
        return msgspec.msgpack.encode(NixlAddress(base, bytes(self._agent.get_agent_metadata()), process))

    def read(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        if peer.sender == self._name:  # NIXL knows no transfer to oneself
            return self._copy(remote_blocks, local_blocks)
        return self._move("READ", peer, remote_blocks, local_blocks, timeout)

    def write(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        if peer.sender == self._name:
            return self._copy(local_blocks, remote_blocks)
        return self._move("WRITE", peer, remote_blocks, local_blocks, timeout)

    def fetched(
        self, peer: PeerMetadata, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> AbstractContextManager[np.ndarray]:
        assert self._staging is not None
        return self._staging.fetched(peer, blocks, block_bytes, timeout)

    def forget(self, peer: PeerMetadata) -> None:
        assert self._staging is not None
        self._staging.forget(peer)
        if remote := self._remotes.pop(peer.sender, None):
            # The peer may be dead already; its handles are of no use either way.
            with contextlib.suppress(Exception):
                remote.table.release()
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(remote.agent)

    def progress(self) -> None:
        # A receiver that dies while it connects must not end the service for the others.
        with contextlib.suppress(Exception):
            self._agent.get_new_notifs()

    def close(self) -> None:
        if self._agent is None:
            return
        for remote in self._remotes.values():
            with contextlib.suppress(Exception):
                remote.table.release()
        self._remotes.clear()
        if self._staging is not None:
            self._staging.close()
        with contextlib.suppress(Exception):
            self._local.release()
            self._agent.deregister_memory(self._registration)
        self._agent = None

    # -- internals

    @property
    def _memory(self) -> str:
        assert self._pool is not None
        return "VRAM" if self._pool.is_cuda else "DRAM"

    @property
    def _device(self) -> int:
        assert self._pool is not None
        return self._pool.get_device() if self._pool.is_cuda else 0

    @property
    def _block_bytes(self) -> int:
        assert self._pool is not None
        return self._pool[0].nbytes

    def _table(self, base: int, num_blocks: int) -> np.ndarray:
        return block_table(base, num_blocks, self._block_bytes, self._device)

    def _connect(self, peer: PeerMetadata) -> _Remote:
        address = address_of(peer)
        added = self._agent.add_remote_agent(address.metadata)
        name = added.decode() if isinstance(added, bytes) else str(added)
        if name != peer.sender:
            self._agent.remove_remote_agent(name)
            raise KvTransferError(f"the metadata of {peer.sender} is that of {name}")
        table = self._agent.prep_xfer_dlist(name, self._table(address.base, peer.num_blocks), self._memory)
        self._remotes[peer.sender] = _Remote(name, table, address)
        return self._remotes[peer.sender]

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> int:
        assert self._pool is not None
        self._pool[torch.from_numpy(targets).long()] = self._pool[torch.from_numpy(sources).long()]
        return len(sources) * self._block_bytes

    def _move(
        self,
        operation: str,
        peer: PeerMetadata,
        remote_blocks: np.ndarray,
        local_blocks: np.ndarray,
        timeout: float,
    ) -> int:
        try:
            remote = self._remotes.get(peer.sender) or self._connect(peer)
            remote.address.require_running(peer)
            self._transfer(operation, peer, remote, remote_blocks, local_blocks, timeout)
        except ReadTimeoutError:
            raise
        except Exception as error:  # the bindings raise a dozen unrelated types
            self.forget(peer)
            raise KvTransferError(f"{_DOING[operation]} {peer.sender} failed: {error}") from error
        return len(local_blocks) * self._block_bytes

    def _transfer(
        self,
        operation: str,
        peer: PeerMetadata,
        remote: _Remote,
        remote_blocks: np.ndarray,
        local_blocks: np.ndarray,
        timeout: float,
    ) -> None:
        # NIXL merges neighbours where both id lists grow by one.
        order = np.argsort(remote_blocks, kind="stable")
        local_ids, remote_ids = (blocks[order].astype(np.int32) for blocks in (local_blocks, remote_blocks))
        handle = self._agent.make_prepped_xfer(operation, self._local, local_ids, remote.table, remote_ids)
        state = self._agent.transfer(handle)
        deadline = time.monotonic() + timeout
        while state == "PROC":
            if time.monotonic() > deadline:
                raise ReadTimeoutError(
                    f"{_DOING[operation]} {peer.sender} took longer than {timeout:.1f} s",
                    may_land_later=True,
                    has_ended=LateNixlTransfer(self._agent, handle).has_ended,
                )
            time.sleep(_POLL_SECONDS)
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise KvTransferError(f"NIXL {operation} ended in state {state}")
