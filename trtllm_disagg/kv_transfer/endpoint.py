"""Where a control channel listens, as text: unix://@NAME:NUMBER on one host, tcp://HOST:PORT between hosts."""

from __future__ import annotations

import re

TCP, UNIX = "tcp", "unix"
EXPECTED = "tcp://HOST:PORT or unix://@NAME:NUMBER"

_ENDPOINT = re.compile(
    r"(?:tcp://(\[[0-9a-fA-F:]+\]|[0-9A-Za-z.-]+)|unix://(@[0-9A-Za-z.-]{1,64})):(\d{1,5})", re.ASCII
)
_MAX_LENGTH = 256


def is_endpoint(text: object) -> bool:
    """It comes from the network, and is connected to."""
    return isinstance(text, str) and split_endpoint(text) is not None


def scheme_of(endpoint: str) -> str:
    return endpoint.partition("://")[0]


def split_endpoint(text: str) -> tuple[str, int] | None:
    """(host, port), an IPv6 address without its brackets, a Unix socket's name with its @; None for what is no
    endpoint.
    """
    match = _ENDPOINT.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None or not 0 < int(match[3]) < 1 << 16:
        return None
    return (match[1] or match[2]).strip("[]"), int(match[3])


def join_endpoint(host: str, port: int) -> str:
    """The way back from `split_endpoint`."""
    if host.startswith("@"):
        return f"{UNIX}://{host}:{port}"
    return f"{TCP}://[{host}]:{port}" if ":" in host else f"{TCP}://{host}:{port}"
