"""NIXL transport: READs and WRITEs a peer's registered memory, on the CPU by UCX's cma.

Measured rules: no progress thread (it spins), strict locking, no reads on an event loop, metadata added once per peer
and re-added only after the old one was removed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from trtllm_disagg.common.machine import ProcessMark, own_mark
from trtllm_disagg.engines.embedded.kv_transfer.base import (
    STAGING_BYTES,
    BlockPairs,
    PeerMetadata,
    ReadTimeoutError,
    decoded_address,
    require_running,
)
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import huge_page_tensor, new_memory
from trtllm_disagg.engines.embedded.kv_transfer.transports import (
    UCX_ERROR_MODE,
    nixl_api,
    require_package_for_gpus,
    ucx_environment,
    ucx_settings,
)
from trtllm_disagg.errors import ConfigError, KvTransferError

_POLL_SECONDS = 0.0002
_DOING = {"READ": "reading KV from", "WRITE": "writing KV to"}
Operation = Literal["READ", "WRITE"]


class NixlAddress(msgspec.Struct, frozen=True):
    """`PeerMetadata.address` of this transport: where a peer's pool is."""

    base: int
    metadata: bytes
    #: UCX finds the peer by its process id, even if another process has reused it.
    process: ProcessMark


class _SerialAgent:
    """Serializes calls of NIXL's agent.

    A transfer holds NIXL's own lock while it copies. Other calls (release a handle, forget a peer) wait for it with
    the GIL held, so one peer's copy would stop the whole engine.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._agent, name)

        def call(*args: Any) -> Any:
            with self._lock:
                return method(*args)

        return call


@dataclass(slots=True)
class _Remote:
    agent: str
    address: NixlAddress
    #: NIXL's prepared descriptor lists of the peer's whole pool, by block size.
    tables: dict[int, Any] = field(default_factory=dict)
    #: Number of transfers that use it now.
    users: int = 1


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    registration: Any


class NixlTransport:
    name = "NIXL"

    def __init__(self, new_agent: Callable[[str, Any], Any] | None = None) -> None:
        """`new_agent` (name, configuration) replaces NIXL's `nixl_agent`."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # read when the first agent is made
        # The caller handles import errors: DEFAULT falls back to shared memory, NIXL does not.
        self._api = nixl_api()
        self._new_agent = new_agent or self._api.nixl_agent
        self._name = ""
        self._agent: Any = None
        self._registration: Any = None
        self._pool: torch.Tensor | None = None
        self._memory, self._device, self._block_bytes = "DRAM", 0, 0
        self._local: Any = None
        self._remotes: dict[str, _Remote] = {}
        self._lock = threading.Lock()
        #: Unused buffers outside the pool.
        self._free: list[_Buffer] = []
        #: Buffers of reads that timed out, each with a check for their end.
        self._lost: list[tuple[_Buffer, Callable[[], bool]]] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            require_package_for_gpus(self._api)
        self._pool = new_memory(shape, dtype, device)
        self._block_bytes = self._pool[0].nbytes
        if self._pool.is_cuda:
            self._memory, self._device = "VRAM", self._pool.get_device()
        return self._pool

    def serve(self, sender: str) -> bytes:
        assert self._pool is not None
        config = self._api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._name = sender
        self._agent = _SerialAgent(self._new_agent(sender, config))
        with ucx_environment(ucx_settings(self._pool.device.type, os.environ)):
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": UCX_ERROR_MODE})
        self._registration = self._registered_pool(self._pool)
        self._local = self._own_table(self._pool, self._pool.shape[0], self._block_bytes)
        metadata = bytes(self._agent.get_agent_metadata())
        return msgspec.msgpack.encode(NixlAddress(self._pool.data_ptr(), metadata, own_mark()))

    def read(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        if peer.sender == self._name:  # NIXL cannot transfer to itself
            return self._copy(blocks.remote, blocks.local)
        return self._move("READ", peer, blocks, timeout)

    def write(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        if peer.sender == self._name:
            return self._copy(blocks.local, blocks.remote)
        return self._move("WRITE", peer, blocks, timeout)

    @contextlib.contextmanager
    def fetched(
        self, peer: PeerMetadata, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> Iterator[np.ndarray]:
        """Thread-safe: every read has its own buffer, and keeps it after a timeout since it may still land."""
        count = len(blocks)
        buffer = self._take_buffer(count * block_bytes)
        try:
            with self._forgotten_if_it_fails("READ", peer):
                into = self._own_table(buffer.memory, count, block_bytes)
                try:
                    pairs = BlockPairs(blocks, np.arange(count))
                    self._transfer("READ", peer, pairs, into, block_bytes, timeout)
                finally:
                    self._agent.release_dlist_handle(into)
        except ReadTimeoutError as late:
            self._lost.append((buffer, late.has_ended))
            raise
        except KvTransferError:
            self._give_back(buffer)
            raise
        try:
            yield buffer.memory[: count * block_bytes].numpy().reshape(-1, block_bytes)
        finally:
            self._give_back(buffer)

    def forget(self, peer: PeerMetadata) -> None:
        self._forget(peer.sender)

    def progress(self) -> None:
        # A receiver that dies while connecting must not stop the others.
        with contextlib.suppress(Exception):
            self._agent.get_new_notifs()

    def close(self) -> None:
        if self._agent is None:
            return
        for remote in list(self._remotes.values()):
            self._release_tables(remote)
        self._remotes.clear()
        with contextlib.suppress(Exception):
            self._agent.release_dlist_handle(self._local)
        for registration in (*(buffer.registration for buffer in self._free), self._registration):
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registration)
        self._free.clear()
        self._agent = None

    # -- internals

    def _registered_pool(self, pool: torch.Tensor) -> Any:
        """Raises ConfigError if UCX cannot register the pool; the log has UCX's message."""
        try:
            return self._register(pool)
        except Exception as error:  # the bindings raise a dozen unrelated types
            place = "a CUDA device, with CUDA's libraries beside it" if pool.is_cuda else "the CPU"
            raise ConfigError.bad_value(
                "cache_transceiver_config.backend",
                "NIXL",
                f"memory that UCX can register, {pool.nbytes} bytes of {place}: {error}",
            ) from error

    def _register(self, memory: torch.Tensor) -> Any:
        return self._agent.register_memory(
            [(memory.data_ptr(), memory.nbytes, self._device, "")], self._memory
        )

    def _own_table(self, memory: torch.Tensor, count: int, block_bytes: int) -> Any:
        return self._table("NIXL_INIT_AGENT", memory.data_ptr(), count, block_bytes)

    def _table(self, agent: str, base: int, count: int, block_bytes: int) -> Any:
        """NIXL's prepared list of (address, bytes, device) of `count` adjacent blocks."""
        table = np.zeros((count, 3), np.uint64)
        table[:, 0] = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        table[:, 1] = block_bytes
        table[:, 2] = self._device
        return self._agent.prep_xfer_dlist(agent, table, self._memory)

    @contextlib.contextmanager
    def _connected(self, operation: Operation, peer: PeerMetadata) -> Iterator[_Remote]:
        """Keeps the peer from being forgotten. Raises KvTransferError if its process has ended or been replaced; reads
        of a known peer skip that check, since no lease confirms bytes of another process.
        """
        with self._lock:
            remote = self._remotes.get(peer.sender)
            if remote is not None:
                remote.users += 1
        try:
            address = decoded_address(peer, NixlAddress) if remote is None else remote.address
            if remote is None or operation == "WRITE":
                require_running(peer, address.process)
            remote = remote or self._add(peer, address)
            yield remote
        finally:
            if remote is not None:
                self._leave(remote)

    def _leave(self, remote: _Remote) -> None:
        with self._lock:
            remote.users -= 1

    def _add(self, peer: PeerMetadata, address: NixlAddress) -> _Remote:
        # A restarted worker has a new name, and NIXL would keep the old one's state. list(): other threads add peers.
        for sender, known in list(self._remotes.items()):
            if not known.address.process.is_running:
                self._forget(sender)
        added = self._agent.add_remote_agent(address.metadata)
        name = added.decode() if isinstance(added, bytes) else str(added)
        if name != peer.sender:
            self._agent.remove_remote_agent(name)
            raise KvTransferError(f"the metadata of {peer.sender} belongs to {name}")
        remote = self._remotes[peer.sender] = _Remote(name, address)
        return remote

    def _forget(self, sender: str) -> None:
        """Drop the peer unless a transfer uses it: released handles must not be used."""
        with self._lock:
            remote = self._remotes.get(sender)
            if remote is None or remote.users:
                return
            del self._remotes[sender]
        # Fails if the peer is dead; its handles are useless either way.
        self._release_tables(remote)
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(remote.agent)

    def _release_tables(self, remote: _Remote) -> None:
        for table in remote.tables.values():
            with contextlib.suppress(Exception):
                self._agent.release_dlist_handle(table)

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> int:
        assert self._pool is not None
        self._pool[torch.from_numpy(targets).long()] = self._pool[torch.from_numpy(sources).long()]
        return len(sources) * self._block_bytes

    def _move(self, operation: Operation, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        with self._forgotten_if_it_fails(operation, peer):
            self._transfer(operation, peer, blocks, self._local, self._block_bytes, timeout)
        return len(blocks.local) * self._block_bytes

    @contextlib.contextmanager
    def _forgotten_if_it_fails(self, operation: Operation, peer: PeerMetadata) -> Iterator[None]:
        """Forgets the peer on failure, except after ReadTimeoutError. Raises KvTransferError otherwise."""
        try:
            yield
        except ReadTimeoutError:
            raise
        except Exception as error:  # the bindings raise a dozen unrelated types
            self.forget(peer)
            raise KvTransferError(f"{_DOING[operation]} {peer.sender} failed: {error}") from error

    def _transfer(
        self,
        operation: Operation,
        peer: PeerMetadata,
        blocks: BlockPairs,
        local: Any,
        block_bytes: int,
        timeout: float,
    ) -> None:
        """`local`: the prepared list that has the local blocks."""
        with self._connected(operation, peer) as remote:
            if block_bytes not in remote.tables:
                base = remote.address.base
                remote.tables[block_bytes] = self._table(remote.agent, base, peer.num_blocks, block_bytes)
            # NIXL merges neighbours where both id lists grow by one.
            order = np.argsort(blocks.remote, kind="stable")
            remote_ids, local_ids = (ids[order].astype(np.int32) for ids in blocks)
            table = remote.tables[block_bytes]
            handle = self._agent.make_prepped_xfer(operation, local, local_ids, table, remote_ids)
            self._run(handle, operation, peer, remote, timeout)

    def _run(
        self, handle: Any, operation: Operation, peer: PeerMetadata, remote: _Remote, timeout: float
    ) -> None:
        deadline = time.monotonic() + timeout
        is_late = False
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                if is_late := time.monotonic() > deadline:
                    with self._lock:
                        # Keep the peer until then: NIXL reports only errors for a forgotten peer's transfer.
                        remote.users += 1
                    raise ReadTimeoutError(
                        f"{_DOING[operation]} {peer.sender} took longer than {timeout:.1f} s",
                        may_land_later=True,
                        has_ended=_LateTransfer(self._agent, handle, partial(self._leave, remote)).has_ended,
                    )
                time.sleep(_POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
        finally:
            if not is_late:
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise KvTransferError(f"NIXL {operation} ended in state {state}")

    def _take_buffer(self, nbytes: int) -> _Buffer:
        with self._lock:
            lost, self._lost = self._lost, []
        late = [(buffer, has_ended, has_ended()) for buffer, has_ended in lost]
        with self._lock:
            self._lost += [(buffer, has_ended) for buffer, has_ended, is_over in late if not is_over]
            self._free += [buffer for buffer, _, is_over in late if is_over]
            for i, buffer in enumerate(self._free):
                if buffer.memory.nbytes >= nbytes:
                    return self._free.pop(i)
        # All of one size, so that each fits every read.
        memory = huge_page_tensor((max(nbytes, STAGING_BYTES),), torch.uint8)
        return _Buffer(memory, self._register(memory))

    def _give_back(self, buffer: _Buffer) -> None:
        with self._lock:
            self._free.append(buffer)


class _LateTransfer:
    """A transfer that timed out. Keeps its handle: once released, the bytes would still land, at an unknown time."""

    def __init__(self, agent: Any, handle: Any, on_end: Callable[[], None]) -> None:
        self._agent = agent
        self._handle = handle
        self._on_end = on_end
        self._has_ended = False
        self._lock = threading.Lock()

    def has_ended(self) -> bool:
        """True once every byte has arrived. A failed transfer has not ended: bytes may still be on their way."""
        # NIXL raises if the peer is gone.
        with self._lock, contextlib.suppress(Exception):
            if not self._has_ended and self._agent.check_xfer_state(self._handle) == "DONE":
                self._has_ended = True
                try:
                    self._agent.release_xfer_handle(self._handle)
                finally:
                    self._on_end()
        return self._has_ended
