"""HTTP requests of commands. A proxy that the environment names is for other machines: it cannot reach a server that
listens on this machine's loopback address, and perhaps not one on another address of this machine.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

#: Of `get`.
TIMEOUT_SECONDS = 2.0
#: Asyncio's own threads are as few as the machine's cores and four: frozen servers would make others wait for one.
_THREADS = ThreadPoolExecutor(256, "http-get")


async def get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body, never through a proxy; status 0 when there is no answer."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _get, host, port, path)


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    connection = HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


def open_url(request: Request, timeout: float) -> HTTPResponse:
    """The open response, to be closed by the caller. `timeout` in seconds. Raises OSError, and HTTPError for a status
    from 400 on.
    """
    handlers = (ProxyHandler({}),) if _is_here(urlsplit(request.full_url).hostname or "") else ()
    response: HTTPResponse = build_opener(*handlers).open(request, timeout=timeout)
    return response


def _is_here(host: str) -> bool:
    """Whether it is an address of this machine: those are the ones to which a socket can be bound."""
    try:
        family = socket.AF_INET if ip_address(host).version == 4 else socket.AF_INET6
    except ValueError:
        return host == "localhost"
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
