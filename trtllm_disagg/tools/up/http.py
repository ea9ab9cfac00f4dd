"""HTTP requests of commands. A proxy that the environment names is for other machines: it cannot reach a server that
listens on this machine's loopback address, and perhaps not one on another address of this machine.
"""

from __future__ import annotations

import asyncio
import io
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from urllib.request import BaseHandler, HTTPHandler, HTTPSHandler, ProxyHandler, Request, build_opener

#: Of `get`.
TIMEOUT_SECONDS = 2.0
#: Of an answer that is read as a whole. The metrics of a large deployment are some megabytes.
MOST_BYTES = 64 << 20
#: Asyncio's own threads are as few as the machine's cores and four: frozen servers would make others wait for one.
_THREADS = ThreadPoolExecutor(256, "http-get")


async def get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body, never through a proxy; status 0 when there is no whole answer within TIMEOUT_SECONDS."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _get, host, port, path)


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    connection = _Connection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, whole_body(response)
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


def open_url(request: Request, timeout: float, *handlers: type[BaseHandler]) -> HTTPResponse:
    """The open response, to be closed by the caller. `timeout` in seconds, for each read. Raises OSError, and HTTPError
    for a status from 400 on.
    """
    direct = (ProxyHandler({}),) if _is_here(urlsplit(request.full_url).hostname or "") else ()
    response: HTTPResponse = build_opener(*direct, *handlers).open(request, timeout=timeout)
    return response


def read_url(request: Request, timeout: float) -> bytes:
    """The body of an answer that is there after `timeout` seconds. Raises what `open_url` and `whole_body` raise; the
    body of an HTTPError comes by `whole_body` as well, in the same time.
    """
    with open_url(request, timeout, _Handler, _TlsHandler) as response:
        return whole_body(response)


def whole_body(response: Any) -> bytes:
    """Raises OSError for a body of more than MOST_BYTES, HTTPException for one that ends too early."""
    body: bytes = response.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise OSError(f"an answer of more than {MOST_BYTES >> 20} MiB")
    if response.length:
        raise IncompleteRead(body, response.length)
    return body


class _InTime(io.RawIOBase):
    """Reads from a socket until its timeout is over. That of the socket itself is for each read: a server that sends a
    byte now and then would keep its reader for ever.
    """

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw = raw
        self._sock = sock
        self._seconds = sock.gettimeout() or 0.0
        self._end = time.monotonic() + self._seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole answer within {self._seconds:g} s")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **keywords: Any) -> None:
        super().__init__(sock, *args, **keywords)
        self.fp = io.BufferedReader(_InTime(self.fp.detach(), sock))


class _Connection(HTTPConnection):
    response_class = _Response


class _TlsConnection(HTTPSConnection):
    response_class = _Response


class _Handler(HTTPHandler):
    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_Connection, request)


class _TlsHandler(HTTPSHandler):
    def https_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_TlsConnection, request)


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
