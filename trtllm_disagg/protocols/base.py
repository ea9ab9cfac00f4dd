"""What a handoff protocol decides: how a handoff is written. Reading is the same for all (`recognise.py`)."""

from __future__ import annotations

from typing import Any, Protocol

from trtllm_disagg.types import Errand, GenerateRequest, Handoff, Rendezvous, TokenChunk


class HandoffProtocol(Protocol):
    """One of them, chosen once at construction. It never changes what it is given."""

    def encode(self, request: GenerateRequest, errand: Errand) -> dict[str, Any]:
        """The body for another worker: as the request came, and what this errand needs besides."""
        ...

    def answer(self, handoff: Handoff, num_prompt: int) -> TokenChunk:
        """A prefill worker's one chunk. A final answer looks the same in all protocols."""
        ...

    def meeting(self, rendezvous: Rendezvous) -> Rendezvous:
        """The meeting in words that `encode` has. Raises ConfigError when it has none for it."""
        ...
