"""The port of /health and /metrics. Dynamo opens it, and when it cannot, it goes on without and says so in its log."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from trtllm_disagg.errors import ConfigError

_PORT, _HOST = "DYN_SYSTEM_PORT", "DYN_SYSTEM_HOST"


def require_system_port(environ: Mapping[str, str]) -> None:
    """Raise ConfigError when it is wanted and taken: a worker without metrics is not what was asked for."""
    port = environ.get(_PORT, "")
    if not port.isdecimal():
        return  # none is wanted, or Dynamo refuses it
    if int(port) > 65535:
        raise ConfigError.bad_value(_PORT, port, "a port, 65535 at most")
    host = environ.get(_HOST) or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family).close()
    except OSError as error:
        allowed = f"a port on {host} ({_HOST}) that can be listened on ({error.strerror or error})"
        raise ConfigError.bad_value(_PORT, port, allowed) from None
