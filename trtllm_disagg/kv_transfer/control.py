"""The control channel: hands out an engine's card, and says whether a lease holds before and after a read.

Begin, read, finish: begin refuses a read that would come too late, and gives the lease time for it; finish says
"held" when nobody touched the blocks meanwhile, so that what was read is exactly the leased prompt's KV. Any other
answer, and the receiver throws it away. A forged, stale or foreign handle reads nothing, and can never put another
prompt's KV into an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.access import Door
from trtllm_disagg.kv_transfer.base import PeerCard
from trtllm_disagg.kv_transfer.framing import ChannelClient, ChannelServer, Limits, UnreadableError
from trtllm_disagg.kv_transfer.handle import UNREADABLE, FromDecode, FromPrefill, KvHandle
from trtllm_disagg.kv_transfer.lease import LeaseTable


class GetCard(msgspec.Struct, tag="card"):
    pass


class Begin(msgspec.Struct, tag="begin"):
    lease: bytes
    digest: bytes


class Finish(msgspec.Struct, tag="finish"):
    lease: bytes
    digest: bytes


class Release(msgspec.Struct, tag="release"):
    lease: bytes


#: What answers which kind of message; it gets the peer's name too.
Desks = Mapping[type, Callable[[Any, str], bytes]]

_requests = msgspec.msgpack.Decoder(GetCard | Begin | Finish | Release | FromDecode | FromPrefill)
_cards = msgspec.msgpack.Decoder(PeerCard)
_encoder = msgspec.msgpack.Encoder()


class ControlServer:
    """The sender's end."""

    def __init__(
        self, door: Door, leases: LeaseTable, on_lease_ended: Callable[[], None], limits: Limits | None = None
    ) -> None:
        self._leases = leases
        self._on_lease_ended = on_lease_ended
        self._card = b""
        self._desks: Desks = {}
        self._channel = ChannelServer(door, self._answer, limits)
        self.endpoint = self._channel.endpoint

    def start(self, card: PeerCard, desks: Desks | None = None) -> None:
        """`desks` answer what is not about leases."""
        self._card = _encoder.encode(card)
        self._desks = desks or {}
        self._channel.start()

    @property
    def num_connections(self) -> int:
        return self._channel.num_connections

    def close(self) -> None:
        self._channel.close()

    def _answer(self, message: bytes, peer: str) -> bytes:
        try:
            request = _requests.decode(message)
        except UNREADABLE as error:
            raise UnreadableError(f"unreadable message of {len(message)} bytes: {error}") from error
        match request:
            case GetCard():
                return self._card
            case Begin(lease, digest):
                return b"held" if self._leases.begin(lease, digest) else self._why_not(lease)
            case Finish(lease, digest):
                answer = b"held" if self._leases.finish(lease, digest) else self._why_not(lease)
            case Release(lease):
                self._leases.release(lease)
                answer = b"ok"
            case _:
                desk = self._desks.get(type(request))
                return b"bad" if desk is None else desk(request, peer)
        self._on_lease_ended()
        return answer

    def _why_not(self, lease: bytes) -> bytes:
        return b"late" if self._leases.has_expired(lease) else b"gone"


class ControlClient:
    """The receiver's end."""

    def __init__(self, door: Door) -> None:
        self._channel = ChannelClient(door)

    def card(self, endpoint: str, timeout: float) -> PeerCard:
        answer = self._ask(endpoint, GetCard(), timeout)
        try:
            return _cards.decode(answer)
        except UNREADABLE as error:
            raise KvTransferError(f"{endpoint} answered with an unreadable card: {error}") from error

    def begin(self, handle: KvHandle, timeout: float) -> bool:
        """True when the lease holds, and now holds on for a read. Raises as `confirm` does."""
        return self._holds(handle, Begin(handle.lease, handle.digest()), timeout)

    def confirm(self, handle: KvHandle, timeout: float) -> bool:
        """True when the lease held from before the read until now. The sender frees its blocks.

        False for a handle that is not the lease's. Raises KvTransferError when the lease ended too early.
        """
        return self._holds(handle, Finish(handle.lease, handle.digest()), timeout)

    def release(self, handle: KvHandle, timeout: float) -> None:
        self._ask(handle.endpoint, Release(handle.lease), timeout)

    def say(self, endpoint: str, message: FromDecode | FromPrefill, timeout: float) -> bytes:
        return self._ask(endpoint, message, timeout)

    def close(self) -> None:
        self._channel.close()

    def _holds(self, handle: KvHandle, question: Begin | Finish, timeout: float) -> bool:
        answer = self._ask(handle.endpoint, question, timeout)
        if answer == b"late":
            raise KvTransferError(f"the lease of {handle.sender} ended before the KV was read")
        return answer == b"held"

    def _ask(self, endpoint: str, question: msgspec.Struct, timeout: float) -> bytes:
        return self._channel.ask(endpoint, _encoder.encode(question), timeout)
