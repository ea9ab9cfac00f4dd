"""CONTEXT_FIRST, both ends: `KvSender` leases a finished prefill's blocks, `KvReceiver` reads them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError
from trtllm_disagg.kv_transfer.access import PeerAuthentication
from trtllm_disagg.kv_transfer.base import KvLayout, KvTimeouts, KvTransport, PeerMetadata, ReadTimeoutError
from trtllm_disagg.kv_transfer.control import ControlClient, ControlServer, LeaseTable, MessageHandlers
from trtllm_disagg.kv_transfer.handle import VERSION, KvHandle
from trtllm_disagg.kv_transfer.peers import (
    DeathWatch,
    LateTransfer,
    PeerMetadataCache,
    PeerWorkers,
    ProgressThread,
    taken,
)

log = logging.getLogger(__name__)


class KvSender:
    """Keeps the blocks of finished context_only requests until a receiver has read them."""

    def __init__(
        self,
        transport: KvTransport,
        layout: KvLayout,
        num_blocks: int,
        *,
        authentication: PeerAuthentication,
        timeouts: KvTimeouts,
        on_lease_ended: Callable[[], None],
    ) -> None:
        self._layout = layout
        # The random part tells this process from an earlier one with the same pid on the same host.
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.leases = LeaseTable(timeouts.transfer)
        self._control = ControlServer(authentication, self.leases, on_lease_ended)
        self.endpoint = self._control.endpoint
        address = transport.serve(self.name)
        self._metadata = PeerMetadata(self.name, transport.name, layout, num_blocks, address)
        self._expects: Callable[[], bool] = bool
        self.progress_thread = ProgressThread(transport, lambda: bool(len(self.leases)) or self._expects())

    def start(self, handlers: MessageHandlers | None = None, expects: Callable[[], bool] = bool) -> None:
        """Answer peers from now on. `handlers` answer what is not about leases; `expects` tells that a peer other
        than the holder of a lease may read or write here.
        """
        self._expects = expects
        self._control.start(self._metadata, handlers)

    def lease(
        self,
        request_id: int,
        blocks: list[int],
        *,
        prompt_digest: bytes,
        num_tokens: int,
        seed: int,
        cached_tokens: int,
    ) -> bytes:
        """Hold the blocks; return the `opaque_state` that lets a receiver read them."""
        lease = self.leases.grant(request_id, blocks)
        handle = KvHandle(
            version=VERSION,
            sender=self.name,
            endpoint=self.endpoint,
            lease=lease.id,
            layout=self._layout.fingerprint(),
            prompt=prompt_digest,
            num_tokens=num_tokens,
            blocks=blocks,
            seed=seed,
            cached_tokens=cached_tokens,
        )
        lease.digest = handle.digest()
        self.progress_thread.expect_peer()
        return handle.encode()

    def close(self) -> None:
        self.progress_thread.close()
        self._control.close()


@dataclass(slots=True, kw_only=True)
class Pull:
    """One request's blocks on their way here. `remote` and `local` pair up; equal lengths."""

    request_id: int
    handle: KvHandle
    remote: list[int]
    local: list[int]
    bytes_moved: int = 0
    error: DisaggError | None = None
    #: The read may still write into `local`: those blocks are not to be used before that has ended.
    late: LateTransfer | None = None
    seconds: float = 0.0


class KvReceiver:
    """Pulls beside the engine's thread, so the engine steps on; finished pulls wait in `take_finished`.

    Each sender has a thread of its own, one pull at a time: one that stalls delays no other sender's pulls.
    """

    def __init__(
        self,
        transport: KvTransport,
        layout: KvLayout,
        *,
        authentication: PeerAuthentication,
        timeouts: KvTimeouts,
        on_finished: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._timeouts = timeouts
        self._on_finished = on_finished
        self.client = ControlClient(authentication)
        self.metadata_cache = PeerMetadataCache(self.client, self._check, timeouts.control)
        self.workers = PeerWorkers()
        self._finished: queue.SimpleQueue[Pull] = queue.SimpleQueue()
        self.in_flight = 0

    def start(self, pull: Pull) -> None:
        self.in_flight += 1
        self.workers.submit(pull.handle.endpoint, self._run, pull)

    def release(self, handle: KvHandle) -> None:
        """Tell the sender that its blocks will not be read; best effort, its lease ends by itself."""
        self.workers.submit(handle.endpoint, self._release, handle)

    def take_finished(self) -> list[Pull]:
        pulls = taken(self._finished)
        self.in_flight -= len(pulls)
        return pulls

    def close(self) -> None:
        self.workers.close()
        self.client.close()

    def _run(self, pull: Pull) -> None:
        started = time.monotonic()
        try:
            self._pull(pull)
        except ReadTimeoutError as error:
            pull.late = self._late(pull.handle.endpoint, error) if error.may_land_later else None
            pull.error = KvTransferError(str(error))
        except DisaggError as error:
            pull.error = error
        except Exception as error:
            log.exception("KV pull of request %d failed unexpectedly", pull.request_id)
            pull.error = KvTransferError(f"{type(error).__name__}: {error}")
        if isinstance(pull.error, KvTransferError):
            self._lost_touch(pull)
        pull.seconds = time.monotonic() - started
        self._finished.put(pull)
        self._on_finished()

    def _late(self, endpoint: str, error: ReadTimeoutError) -> LateTransfer:
        sender = DeathWatch(self.client, endpoint, self._timeouts)
        return LateTransfer(endpoint, lambda: error.has_ended() or sender.is_dead())

    def _lost_touch(self, pull: Pull) -> None:
        """The next pull starts afresh; should the sender be alive, its blocks are free again. Never raises: the engine
        waits for the end of this pull.
        """
        try:
            with contextlib.ExitStack() as in_any_case:
                in_any_case.callback(self._release, pull.handle)
                metadata = self.metadata_cache.drop(pull.handle.endpoint)
                if metadata is not None and pull.late is None:
                    self._transport.forget(metadata)
        except Exception:
            log.exception("cleaning up after the KV pull of request %d failed", pull.request_id)

    def _pull(self, pull: Pull) -> None:
        handle, seconds = pull.handle, self._timeouts.control
        metadata = self.metadata_cache.of_sender(handle.endpoint, handle.sender)
        if handle.layout != self._layout.fingerprint():
            raise HandoffRefusedError("the handoff names another KV layout than its prefill worker has")
        if max(pull.remote, default=-1) >= metadata.num_blocks:
            raise HandoffRefusedError(
                f"the handoff names block {max(pull.remote)}; its prefill worker has {metadata.num_blocks}"
            )
        if pull.local:
            _require_held(handle, self.client.begin(handle, seconds))
            remote, local = np.asarray(pull.remote, np.int32), np.asarray(pull.local, np.int32)
            pull.bytes_moved = self._transport.read(metadata, remote, local, self._timeouts.transfer)
        _require_held(handle, self.client.confirm(handle, seconds))

    def _check(self, metadata: PeerMetadata) -> None:
        self._layout.require_same(metadata.layout)
        if metadata.transport != self._transport.name:
            raise HandoffRefusedError(
                f"prefill sends KV by {metadata.transport}, decode reads by {self._transport.name}; "
                "set the same cache_transceiver_config.backend on both"
            )

    def _release(self, handle: KvHandle) -> None:
        with contextlib.suppress(KvTransferError):
            self.client.release(handle, self._timeouts.control)


def _require_held(handle: KvHandle, is_held: bool) -> None:
    if not is_held:
        raise HandoffRefusedError(
            f"prefill worker {handle.sender} does not hold this handoff (stale, used before, or forged)"
        )
