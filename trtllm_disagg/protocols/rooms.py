"""A rendezvous as bootstrap_host, bootstrap_port and bootstrap_room, there and back."""

from __future__ import annotations

from typing import Any

from trtllm_disagg.errors import ConfigError, HandoffRefusedError
from trtllm_disagg.kv_transfer.endpoint import join_endpoint, split_endpoint
from trtllm_disagg.types import Rendezvous, WireRequest

_KEYS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def keys_of(rendezvous: Rendezvous) -> dict[str, Any]:
    """Raise ConfigError for an engine that is not met at one endpoint."""
    place = (
        split_endpoint(rendezvous.ctx_info_endpoint[0]) if len(rendezvous.ctx_info_endpoint) == 1 else None
    )
    if place is None:
        raise ConfigError(
            "--handoff-protocol bootstrap names one host and port, and the prefill engine is met at "
            f"{rendezvous.ctx_info_endpoint}; --handoff-protocol dynamo can say that"
        )
    return dict(zip(_KEYS, (*place, rendezvous.disagg_request_id), strict=True))


def room_in(wire: WireRequest) -> Rendezvous | None:
    """Raise HandoffRefusedError when a key is missing or names no place. Types and ranges are checked already."""
    given = {name: getattr(wire, name) for name in _KEYS}
    if all(value is None for value in given.values()):
        return None
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise HandoffRefusedError(
            f"request: {', '.join(missing)} missing; expected all of {', '.join(_KEYS)}"
        )
    endpoint = join_endpoint(given["bootstrap_host"], given["bootstrap_port"])
    if split_endpoint(endpoint) is None:
        raise HandoffRefusedError(f"request: bootstrap_host {given['bootstrap_host']!r} is no host")
    return Rendezvous(given["bootstrap_room"], [endpoint])
