"""NATS's client, which takes tls:// for a wish where it has to be a condition."""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.aio.client import Client


class NatsClient(Client):
    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """The server's first word, before it is told anything. Without this, one that offers no TLS would be sent the
        password and all else in the clear.
        """
        wants_tls = self._current_server is not None and self._current_server.uri.scheme == "tls"
        if wants_tls and not info.get("tls_required"):
            raise nats.errors.Error("this one offers no TLS")
        await super()._process_info(info, initial_connection=initial_connection)
