"""NIXL reads of whole remote blocks into memory beside the pool, for blocks that do not fit into it as they are."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.base import PeerMetadata, ReadTimeoutError
from trtllm_disagg.kv_transfer.handle import UNREADABLE
from trtllm_disagg.kv_transfer.host import ProcessMark, huge_page_tensor

# Where a NIXL peer's pool is: `PeerMetadata.address` of that transport.


class NixlAddress(msgspec.Struct, frozen=True):
    base: int
    metadata: bytes
    #: On one host, where UCX knows the peer by its process id, whatever process has that now.
    process: ProcessMark | None

    def require_running(self, peer: PeerMetadata) -> None:
        """Raises KvTransferError when the peer's process has ended."""
        if self.process is not None and not self.process.is_running:
            raise KvTransferError(f"{peer.sender} is gone (pid {self.process.pid})")


def address_of(peer: PeerMetadata) -> NixlAddress:
    """Raises KvTransferError for metadata that are not of this transport."""
    try:
        return msgspec.msgpack.decode(peer.address, type=NixlAddress)
    except UNREADABLE as error:
        raise KvTransferError(f"the metadata of {peer.sender} has an unreadable address: {error}") from error


_POLL_SECONDS = 0.0002


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    registration: Any


@dataclass(slots=True)
class _Remote:
    agent: str
    table: Any
    block_bytes: int
    address: NixlAddress


class NixlStaging:
    """Thread-safe: every read has a buffer of its own. One that timed out keeps it, since it may still land."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._free: list[_Buffer] = []
        self._lost: list[_Buffer] = []
        self._remotes: dict[str, _Remote] = {}

    @contextlib.contextmanager
    def fetched(
        self, peer: PeerMetadata, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> Iterator[np.ndarray]:
        """(blocks, block_bytes) uint8, until the context ends."""
        buffer = self._take(len(blocks) * block_bytes)
        try:
            self._read(buffer, peer, blocks, block_bytes, timeout)
        except ReadTimeoutError:
            self._lost.append(buffer)
            raise
        except Exception as error:  # the bindings raise a dozen unrelated types
            self._give_back(buffer)
            self.forget(peer)
            raise KvTransferError(f"reading KV from {peer.sender} failed: {error}") from error
        try:
            yield buffer.memory[: len(blocks) * block_bytes].numpy().reshape(-1, block_bytes)
        finally:
            self._give_back(buffer)

    def forget(self, peer: PeerMetadata) -> None:
        if remote := self._remotes.pop(peer.sender, None):
            with contextlib.suppress(Exception):
                remote.table.release()
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(remote.agent)

    def close(self) -> None:
        for remote in self._remotes.values():
            with contextlib.suppress(Exception):
                remote.table.release()
        self._remotes.clear()
        for buffer in self._free:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(buffer.registration)
        self._free.clear()

    def _take(self, nbytes: int) -> _Buffer:
        with self._lock:
            for i, buffer in enumerate(self._free):
                if buffer.memory.nbytes >= nbytes:
                    return self._free.pop(i)
        memory = huge_page_tensor((nbytes,), torch.uint8)
        return _Buffer(
            memory, self._agent.register_memory([(memory.data_ptr(), memory.nbytes, 0, "")], "DRAM")
        )

    def _give_back(self, buffer: _Buffer) -> None:
        with self._lock:
            self._free.append(buffer)

    def _read(
        self, buffer: _Buffer, peer: PeerMetadata, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> None:
        remote = self._remotes.get(peer.sender) or self._connect(peer, block_bytes)
        remote.address.require_running(peer)
        count = len(blocks)
        local = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", block_table(buffer.memory.data_ptr(), count, block_bytes), "DRAM"
        )
        # NIXL merges neighbours where both id lists grow by one.
        ours, theirs = np.arange(count, dtype=np.int32), np.ascontiguousarray(blocks, np.int32)
        handle = self._agent.make_prepped_xfer("READ", local, ours, remote.table, theirs)
        state = self._agent.transfer(handle)
        deadline = time.monotonic() + timeout
        while state == "PROC":
            if time.monotonic() > deadline:
                with contextlib.suppress(Exception):
                    handle.release()
                raise ReadTimeoutError(
                    f"reading KV from {peer.sender} took longer than {timeout:.1f} s", may_land_later=True
                )
            time.sleep(_POLL_SECONDS)
            state = self._agent.check_xfer_state(handle)
        handle.release()
        local.release()
        if state != "DONE":
            raise KvTransferError(f"NIXL read ended in state {state}")

    def _connect(self, peer: PeerMetadata, block_bytes: int) -> _Remote:
        address = address_of(peer)
        added = self._agent.add_remote_agent(address.metadata)
        name = added.decode() if isinstance(added, bytes) else str(added)
        if name != peer.sender:
            self._agent.remove_remote_agent(name)
            raise KvTransferError(f"the metadata of {peer.sender} is that of {name}")
        table = block_table(address.base, peer.num_blocks, block_bytes)
        remote = _Remote(name, self._agent.prep_xfer_dlist(name, table, "DRAM"), block_bytes, address)
        self._remotes[peer.sender] = remote
        return remote


def block_table(base: int, count: int, block_bytes: int, device: int = 0) -> np.ndarray:
    """(address, bytes, device) of `count` blocks, one behind the other."""
    table = np.zeros((count, 3), np.uint64)
    table[:, 0] = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
    table[:, 1] = block_bytes
    table[:, 2] = device
    return table


# A NIXL transfer that took too long, and is not let go of: only its handle can tell when it has ended.


class LateNixlTransfer:
    """Released while it is under way, it would land all the same, at a time that nothing tells."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._has_ended = False

    def has_ended(self) -> bool:
        """True once every byte is there. One that ended badly has not: some of it may still be on its way."""
        # NIXL raises for a peer that is gone.
        with contextlib.suppress(Exception):
            if not self._has_ended and self._agent.check_xfer_state(self._handle) == "DONE":
                self._has_ended = True
                self._handle.release()
        return self._has_ended
