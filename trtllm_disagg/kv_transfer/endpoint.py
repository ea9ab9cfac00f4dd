"""Where a control channel listens, as text: tcp://HOST:PORT."""

from __future__ import annotations

import re

_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[0-9A-Za-z.-]+):(\d{1,5})")
_MAX_LENGTH = 256


def is_endpoint(text: object) -> bool:
    """It comes from the network, and is connected to."""
    return isinstance(text, str) and split_endpoint(text) is not None


def split_endpoint(text: str) -> tuple[str, int] | None:
    """(host, port), an IPv6 address without its brackets; None for what is no endpoint."""
    match = _ENDPOINT.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None or not 0 < int(match[2]) < 1 << 16:
        return None
    return match[1].strip("[]"), int(match[2])


def join_endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
