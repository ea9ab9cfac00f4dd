"""The prefill engine's moves in a push: read what decode has, write what it lacks, give notice."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError
from trtllm_disagg.kv_transfer.base import KvTransport, PeerCard, ReadTimeoutError
from trtllm_disagg.kv_transfer.cards import Cards
from trtllm_disagg.kv_transfer.control import ControlClient
from trtllm_disagg.kv_transfer.lanes import Lanes
from trtllm_disagg.kv_transfer.offer import Failure, Notice, StillOffered
from trtllm_disagg.kv_transfer.push import Push

log = logging.getLogger(__name__)

_CONTROL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Move:
    """What has ended: decode's prefix was read, notice was taken, a failure was told, or a move went wrong."""

    push: Push
    what: Literal["read", "delivered", "told", "broken"]
    error: DisaggError | None = None
    #: Own blocks that a read may still fill: not to be used again.
    lost: tuple[int, ...] = ()


class KvPusher:
    """Each push's moves run in order, on its decode engine's lane, beside the engine's thread."""

    def __init__(
        self,
        transport: KvTransport,
        client: ControlClient,
        lanes: Lanes,
        *,
        timeout_seconds: float,
        on_finished: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._client = client
        self._lanes = lanes
        self._timeout = timeout_seconds
        self._on_finished = on_finished
        self._finished: queue.SimpleQueue[Move] = queue.SimpleQueue()
        self.cards = Cards(client, self._check)
        #: Writes that have ended. Used by tests and statistics.
        self.writes = 0

    def read(self, push: Push, first: int, local: list[int]) -> None:
        """Fetch decode's blocks from the `first` on into `local`."""
        self._lanes.submit(
            push.offer.endpoint, self._run, push, lambda: self._read(push, first, local), local
        )

    def write(self, push: Push, first: int, local: list[int]) -> None:
        """Put `local` into decode's blocks from the `first` on."""
        self._lanes.submit(push.offer.endpoint, self._run, push, lambda: self._write(push, first, local))

    def deliver(self, push: Push, notice: Notice) -> None:
        """After all writes. `bytes_moved` of the notice is filled in when they have ended."""
        self._lanes.submit(push.offer.endpoint, self._run, push, lambda: self._deliver(push, notice))

    def fail(self, push: Push, reason: str) -> None:
        """Nothing more is written; decode is told, if it can be."""
        push.close()
        self._lanes.submit(push.offer.endpoint, self._tell, push, reason)

    def take_finished(self) -> list[Move]:
        moves: list[Move] = []
        with contextlib.suppress(queue.Empty):
            while True:
                moves.append(self._finished.get_nowait())
        return moves

    # -- on the lane

    def _run(self, push: Push, move: Callable[[], None], filled: Sequence[int] = ()) -> None:
        """`filled`: blocks of this engine that the move writes into."""
        lost: tuple[int, ...] = ()
        with push.operation() as allowed:
            if not allowed:
                self._finish(Move(push, "broken", KvTransferError(_GIVEN_UP)))
                return
            try:
                move()
                return
            except ReadTimeoutError as error:
                reason: DisaggError = KvTransferError(str(error))
                lost = tuple(filled) if error.may_land_later else ()
                may_land_later = error.may_land_later
            except DisaggError as error:
                reason, may_land_later = error, False
            except Exception as error:
                log.exception("a KV push to %s failed unexpectedly", push.offer.decode)
                reason, may_land_later = KvTransferError(f"{type(error).__name__}: {error}"), False
            if may_land_later and not filled:
                push.never_stops()
            push.close()
        card = self.cards.drop(push.offer.endpoint)
        try:
            if card is not None and not may_land_later:
                self._transport.forget(card)
        except Exception:  # somebody waits for the end of this move
            log.exception("cleaning up after a KV push to %s failed", push.offer.decode)
        self._finish(Move(push, "broken", reason, lost))

    def _read(self, push: Push, first: int, local: list[int]) -> None:
        self._transport.read(*self._aim(push, first, local), self._timeout)
        # As with a lease: who holds the blocks says afterwards whether they were touched.
        if self._say(push, StillOffered(push.offer.ticket)) != b"held":
            raise KvTransferError(_GIVEN_UP)
        self._finish(Move(push, "read"))

    def _write(self, push: Push, first: int, local: list[int]) -> None:
        push.bytes_moved += self._transport.write(*self._aim(push, first, local), self._timeout)
        self.writes += 1

    def _deliver(self, push: Push, notice: Notice) -> None:
        notice = msgspec.structs.replace(notice, bytes_moved=push.bytes_moved)
        try:
            answer = self._say(push, notice)
        except KvTransferError:  # the connection may have been an old one
            answer = self._say(push, notice)
        if answer != b"taken":
            raise KvTransferError(_GIVEN_UP)
        push.close()
        self._finish(Move(push, "delivered"))

    def _tell(self, push: Push, reason: str) -> None:
        with contextlib.suppress(KvTransferError):
            self._say(push, Failure(push.offer.ticket, reason[:1000], push.stopped.is_set()))
        self._finish(Move(push, "told"))

    def _aim(self, push: Push, first: int, local: list[int]) -> tuple[PeerCard, np.ndarray, np.ndarray]:
        """Whose memory, which blocks there, and which here."""
        card = self.cards.of_peer(push.offer.endpoint, push.offer.decode)
        remote = push.offer.blocks[first : first + len(local)]
        if max(remote) >= card.num_blocks:
            raise HandoffRefusedError(
                f"the offer names block {max(remote)}; its decode worker has {card.num_blocks}"
            )
        return card, np.asarray(remote, np.int32), np.asarray(local, np.int32)

    def _say(self, push: Push, message: Notice | Failure | StillOffered) -> bytes:
        return self._client.say(push.offer.endpoint, message, _CONTROL_SECONDS)

    def _check(self, card: PeerCard) -> None:
        if card.transport != self._transport.name:
            raise HandoffRefusedError(
                f"decode takes KV by {card.transport}, prefill writes by {self._transport.name}; "
                "set the same cache_transceiver_config.backend on both"
            )

    def _finish(self, move: Move) -> None:
        self._finished.put(move)
        self._on_finished()


_GIVEN_UP = "the decode worker has given up on this request"
