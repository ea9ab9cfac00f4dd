"""A NIXL transfer that took too long, and is not let go of: only its handle can tell when it has ended."""

from __future__ import annotations

import contextlib
from typing import Any


class LateTransfer:
    """Released while it is under way, it would land all the same, and nobody would know when (facts: nixl.md)."""

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
