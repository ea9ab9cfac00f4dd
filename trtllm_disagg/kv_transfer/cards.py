"""The cards of peers: loaded at the first meeting, kept, and dropped when the peer is lost or restarted."""

from __future__ import annotations

from collections.abc import Callable

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.base import PeerCard
from trtllm_disagg.kv_transfer.control import ControlClient

_CONTROL_SECONDS = 5.0


class Cards:
    """By endpoint. A peer's card is asked for on that peer's lane only."""

    def __init__(self, client: ControlClient, check: Callable[[PeerCard], None]) -> None:
        """`check` raises a DisaggError for a peer whose KV does not fit ours."""
        self._client = client
        self._check = check
        self._cards: dict[str, PeerCard] = {}
        self.loads = 0

    def of(self, endpoint: str) -> PeerCard:
        """Whoever is, or was last seen, at this endpoint."""
        return self._cards.get(endpoint) or self._load(endpoint)

    def of_peer(self, endpoint: str, name: str) -> PeerCard:
        """Raises KvTransferError when somebody else is at the endpoint now."""
        card = self._cards.get(endpoint)
        if card is None or card.sender != name:
            card = self._load(endpoint)
        if card.sender != name:
            raise KvTransferError(f"the handoff is from {name}, but {card.sender} is at {endpoint} now")
        return card

    def drop(self, endpoint: str) -> PeerCard | None:
        return self._cards.pop(endpoint, None)

    def _load(self, endpoint: str) -> PeerCard:
        card = self._client.card(endpoint, _CONTROL_SECONDS)
        self._check(card)
        self.loads += 1
        self._cards[endpoint] = card
        return card
