"""Which ports of this machine are free."""

from __future__ import annotations

import os
import random
import socket

from trtllm_disagg.deployment.errors import PortInUseError
from trtllm_disagg.deployment.plan import LOOPBACK

# Dynamo reads DYN_SYSTEM_PORT as a signed 16 bit number. The kernel takes ephemeral ports from above these.
SYSTEM_PORTS = range(20000, 32768)


def free_system_ports(count: int) -> list[int]:
    """Distinct ports for the workers' health and metrics."""
    free: list[int] = []
    for port in random.sample(SYSTEM_PORTS, len(SYSTEM_PORTS)):
        if len(free) == count:
            break
        if is_free(LOOPBACK, port):
            free.append(port)
    if len(free) < count:
        raise PortInUseError(f"{count} free ports are needed in {SYSTEM_PORTS}, {len(free)} were found")
    return free


def free_http_port(host: str, port: int) -> int:
    """`port` itself, or any free one when it is 0."""
    try:
        with _listener(host, port) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        allowed = f"a port on {host} that can be listened on ({reason}); 0 takes any free one"
        raise PortInUseError.bad_value("--http-port", port, allowed) from None


def is_free(host: str, port: int) -> bool:
    try:
        with _listener(host, port):
            return True
    except OSError:
        return False


def _listener(host: str, port: int) -> socket.socket:
    # create_server sets SO_REUSEADDR: connections of a previous run in TIME_WAIT do not count as use.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
