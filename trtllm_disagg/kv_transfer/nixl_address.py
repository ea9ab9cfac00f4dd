"""Where a NIXL peer's pool is: `PeerCard.address` of that transport."""

from __future__ import annotations

import msgspec

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.base import PeerCard
from trtllm_disagg.kv_transfer.handle import UNREADABLE
from trtllm_disagg.kv_transfer.running import ProcessMark


class NixlAddress(msgspec.Struct, frozen=True):
    base: int
    metadata: bytes
    #: On one host, where UCX knows the peer by its process id, whatever process has that now.
    process: ProcessMark | None

    def require_running(self, peer: PeerCard) -> None:
        """Raises KvTransferError when the peer's process has ended."""
        if self.process is not None and not self.process.is_running:
            raise KvTransferError(f"{peer.sender} is gone (pid {self.process.pid})")


def address_of(peer: PeerCard) -> NixlAddress:
    """Raises KvTransferError for a card that is not of this transport."""
    try:
        return msgspec.msgpack.decode(peer.address, type=NixlAddress)
    except UNREADABLE as error:
        raise KvTransferError(f"the card of {peer.sender} has an unreadable address: {error}") from error
