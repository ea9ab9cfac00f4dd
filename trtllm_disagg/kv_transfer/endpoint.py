"""Where a control channel listens, as text: tcp://HOST:PORT."""

from __future__ import annotations

import re

_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[0-9A-Za-z.-]+):(\d{1,5})")
_MAX_LENGTH = 256


def is_endpoint(text: object) -> bool:
    """It comes from the network, and is connected to."""
    match = _ENDPOINT.fullmatch(text) if isinstance(text, str) and len(text) <= _MAX_LENGTH else None
    return match is not None and 0 < int(match[2]) < 1 << 16
