"""Checks the port of a worker's /health and /metrics, which Dynamo reads from the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trtllm_disagg.errors import ConfigError

_SYSTEM_PORT, _SYSTEM_HOST, _NO_PORT = "DYN_SYSTEM_PORT", "DYN_SYSTEM_HOST", "-1"
#: Dynamo reads a signed 16-bit number.
_HIGHEST_PORT = 2**15 - 1


def require_system_port(environ: Mapping[str, str]) -> None:
    """Raises ConfigError if the port of /health and /metrics is set, but Dynamo cannot read or open it: Dynamo would
    serve without metrics.
    """
    port = environ.get(_SYSTEM_PORT, "")
    if not port or port.startswith("-"):
        return  # neither opens a port
    if not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise ConfigError.bad_value(_SYSTEM_PORT, port, f"a port, {_HIGHEST_PORT} at most")
    host = environ.get(_SYSTEM_HOST) or "0.0.0.0"
    if not _can_be_host(host):
        raise ConfigError.bad_value(_SYSTEM_HOST, host, "an address or a host's name")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family).close()
    except OSError as error:
        allowed = f"a port on {host} ({_SYSTEM_HOST}) that can be listened on ({error.strerror or error})"
        raise ConfigError.bad_value(_SYSTEM_PORT, port, allowed) from None


@contextmanager
def without_system_port() -> Iterator[None]:
    """A runtime made inside opens no system port. The variable stays: another thread may be copying them."""
    port = os.environ.get(_SYSTEM_PORT, _NO_PORT)
    os.environ[_SYSTEM_PORT] = _NO_PORT
    try:
        yield
    finally:
        os.environ[_SYSTEM_PORT] = port


def _can_be_host(text: str) -> bool:
    """For other texts Python's sockets raise TypeError or ValueError, and leak a socket."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return "\0" not in text
