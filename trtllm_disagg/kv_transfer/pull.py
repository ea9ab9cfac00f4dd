"""Both ends of the KV handoff, as the engine core sees them: `KvSender` leases, `KvReceiver` pulls."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError
from trtllm_disagg.kv_transfer.access import Door, PeerGoneError
from trtllm_disagg.kv_transfer.base import KvLayout, KvTransport, PeerCard, ReadTimeoutError
from trtllm_disagg.kv_transfer.control import ControlClient, ControlServer, Desks
from trtllm_disagg.kv_transfer.handle import VERSION, KvHandle
from trtllm_disagg.kv_transfer.lease import Lease, LeaseTable
from trtllm_disagg.kv_transfer.peers import Cards, Lanes, Pump

# Pulls that took too long: their blocks can be used again once the read has ended, or its sender is dead.


if TYPE_CHECKING:
    pass

_ASK_SECONDS = 0.5
_CONTROL_SECONDS = 5.0
#: The control channel closes first. By then an engine that closes has ended or been killed, and so have ranks of its
#: that were stopped, and what they had sent has arrived.
_GONE_SECONDS = 15.0


class LatePulls:
    """Asked after from time to time, each on its sender's lane."""

    def __init__(self, client: ControlClient, lanes: Lanes, on_ended: Callable[[], None]) -> None:
        self._client = client
        self._lanes = lanes
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._late: list[Pull] = []
        self._asking: set[int] = set()
        #: When a pull's sender was first missed, and never met since; by id(pull).
        self._gone_since: dict[int, float] = {}
        self._ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pull: Pull) -> None:
        """Its blocks are kept apart from now on."""
        with self._lock:
            self._late.append(pull)
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask_all, name="kv-late", daemon=True)
            self._thread.start()

    def take_ended(self) -> list[Pull]:
        """Nothing can be written into their blocks any more. Each is told once."""
        ended: list[Pull] = []
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _ask_all(self) -> None:
        while not self._closed.wait(_ASK_SECONDS):
            with self._lock:
                waiting = [pull for pull in self._late if id(pull) not in self._asking]
                self._asking |= {id(pull) for pull in waiting}
            for pull in waiting:
                self._lanes.submit(pull.handle.endpoint, self._ask, pull)

    def _ask(self, pull: Pull) -> None:
        has_ended = pull.has_ended() or self._is_sender_dead(pull)
        with self._lock:
            self._asking.discard(id(pull))
            if has_ended:
                self._gone_since.pop(id(pull), None)
                self._late.remove(pull)
        if has_ended:
            self._ended.put(pull)
            self._on_ended()

    def _is_sender_dead(self, pull: Pull) -> bool:
        """Nobody has listened where it did for a while: its process has ended, and the bytes that it sends with it."""
        try:
            self._client.card(pull.handle.endpoint, _CONTROL_SECONDS)
        except PeerGoneError:
            missed = self._gone_since.setdefault(id(pull), time.monotonic())
            return time.monotonic() - missed >= _GONE_SECONDS
        except KvTransferError:  # slow, or stopped
            pass
        self._gone_since.pop(id(pull), None)
        return False


log = logging.getLogger(__name__)


class KvSender:
    """Keeps the blocks of finished context_only requests until a receiver has read them."""

    def __init__(
        self,
        transport: KvTransport,
        layout: KvLayout,
        num_blocks: int,
        *,
        door: Door,
        lease_seconds: float,
        on_lease_ended: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._layout = layout
        # The random part tells this process from an earlier one with the same pid on the same host.
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.leases = LeaseTable(lease_seconds)
        self._control = ControlServer(door, self.leases, on_lease_ended)
        self.endpoint = self._control.endpoint
        self._card = PeerCard(self.name, transport.name, layout, num_blocks, transport.serve(self.name))
        self._expects: Callable[[], bool] = bool
        self.pump = Pump(transport, lambda: bool(len(self.leases)) or self._expects())

    def start(self, desks: Desks | None = None, expects: Callable[[], bool] = bool) -> None:
        """Answer peers from now on. `desks` answer what is not about leases; `expects` tells that somebody other
        than the holder of a lease may read or write here.
        """
        self._expects = expects
        self._control.start(self._card, desks)

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
        self.pump.hurry()
        return handle.encode()

    def take_ended(self) -> list[Lease]:
        return self.leases.take_ended()

    def close(self) -> None:
        self.pump.close()
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
    #: The read may still write into `local`: those blocks are not to be used before it `has_ended`.
    may_land_later: bool = False
    has_ended: Callable[[], bool] = bool
    seconds: float = field(default=0.0)


class KvReceiver:
    """Pulls beside the engine's thread, so the engine steps on; finished pulls wait in `take_finished`.

    Each sender has a lane of its own, one pull at a time: one that stalls delays nobody else's.
    """

    def __init__(
        self,
        transport: KvTransport,
        layout: KvLayout,
        *,
        door: Door,
        timeout_seconds: float,
        on_finished: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._timeout = timeout_seconds
        self._on_finished = on_finished
        self.client = ControlClient(door)
        self.cards = Cards(self.client, self._check)
        self.lanes = Lanes()
        self._finished: queue.SimpleQueue[Pull] = queue.SimpleQueue()
        self.late = LatePulls(self.client, self.lanes, on_finished)
        self.in_flight = 0

    def start(self, pull: Pull) -> None:
        self.in_flight += 1
        self.lanes.submit(pull.handle.endpoint, self._run, pull)

    def release(self, handle: KvHandle) -> None:
        """Tell the sender that nobody will read; best effort, its lease ends by itself."""
        self.lanes.submit(handle.endpoint, self._release, handle)

    def take_finished(self) -> list[Pull]:
        pulls: list[Pull] = []
        with contextlib.suppress(queue.Empty):
            while True:
                pulls.append(self._finished.get_nowait())
                self.in_flight -= 1
        return pulls

    def close(self) -> None:
        self.late.close()
        self.lanes.close()
        self.client.close()

    def _run(self, pull: Pull) -> None:
        started = time.monotonic()
        try:
            self._pull(pull)
        except ReadTimeoutError as error:
            pull.may_land_later, pull.has_ended = error.may_land_later, error.has_ended
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

    def _lost_touch(self, pull: Pull) -> None:
        """The next pull starts afresh; should the sender be alive, its blocks are free again. Never raises: somebody
        waits for the end of this pull.
        """
        try:
            with contextlib.ExitStack() as whatever_happens:
                whatever_happens.callback(self._release, pull.handle)
                card = self.cards.drop(pull.handle.endpoint)
                if card is not None and not pull.may_land_later:
                    self._transport.forget(card)
        except Exception:
            log.exception("cleaning up after the KV pull of request %d failed", pull.request_id)

    def _pull(self, pull: Pull) -> None:
        handle = pull.handle
        card = self.cards.of_peer(handle.endpoint, handle.sender)
        if handle.layout != self._layout.fingerprint():
            raise HandoffRefusedError("the handoff names another KV layout than its prefill worker has")
        if max(pull.remote, default=-1) >= card.num_blocks:
            raise HandoffRefusedError(
                f"the handoff names block {max(pull.remote)}; its prefill worker has {card.num_blocks}"
            )
        if pull.local:
            _require_held(handle, self.client.begin(handle, _CONTROL_SECONDS))
            pull.bytes_moved = self._transport.read(
                card, np.asarray(pull.remote, np.int32), np.asarray(pull.local, np.int32), self._timeout
            )
        _require_held(handle, self.client.confirm(handle, _CONTROL_SECONDS))

    def _check(self, card: PeerCard) -> None:
        self._layout.require_same(card.layout)
        if card.transport != self._transport.name:
            raise HandoffRefusedError(
                f"prefill sends KV by {card.transport}, decode reads by {self._transport.name}; "
                "set the same cache_transceiver_config.backend on both"
            )

    def _release(self, handle: KvHandle) -> None:
        with contextlib.suppress(KvTransferError):
            self.client.release(handle, _CONTROL_SECONDS)


def _require_held(handle: KvHandle, is_held: bool) -> None:
    if not is_held:
        raise HandoffRefusedError(
            f"prefill worker {handle.sender} does not hold this handoff (stale, used before, or forged)"
        )
