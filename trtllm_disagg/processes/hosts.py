"""Names of hosts as users write them."""

from __future__ import annotations


def can_be_host(text: str) -> bool:
    """Python's sockets raise TypeError or ValueError for other texts, and leave a socket open."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return "\0" not in text
