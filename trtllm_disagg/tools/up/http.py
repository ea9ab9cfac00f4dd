"""HTTP requests of commands. A proxy that the environment names is for other machines: it cannot reach a server that
listens on this machine's loopback address, and perhaps not one on another address of this machine.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from aiohttp import ClientSession

#: Of `get`.
TIMEOUT_SECONDS = 2.0
#: Of an answer that is read as a whole. The metrics of a large deployment are some megabytes.
MOST_BYTES = 64 << 20


async def get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a server on this machine; status 0 when there is no whole answer within TIMEOUT_SECONDS."""
    place = f"[{host}]" if ":" in host else host
    try:
        return await ask(f"http://{place}:{port}{path}", TIMEOUT_SECONDS)
    except OSError:
        return 0, b""


async def ask(
    url: str, seconds: float, body: object = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body of the answer to a GET, or to a POST of `body` as JSON. Raises OSError without an answer that is
    whole after `seconds`, and of at most MOST_BYTES.
    """
    # Imported here because `--help` does not need it.
    from aiohttp import ClientConnectorError, ClientError

    method = "GET" if body is None else "POST"
    try:
        async with (
            asyncio.timeout(seconds),
            session(url) as client,
            client.request(method, url, json=body, headers=headers) as response,
        ):
            whole = bytearray()
            async for part in response.content.iter_any():
                whole += part
                if len(whole) > MOST_BYTES:
                    raise OSError(f"an answer of more than {MOST_BYTES >> 20} MiB")
            return response.status, bytes(whole)
    except TimeoutError:
        raise TimeoutError(f"no whole answer within {seconds:g} s") from None
    except ClientConnectorError as error:
        raise error.os_error from None
    except ClientError as error:
        raise OSError(str(error)) from error


def session(url: str, **options: Any) -> ClientSession:
    """For requests to `url`, with aiohttp's `options`; without its timeouts."""
    from aiohttp import ClientSession, ClientTimeout

    is_elsewhere = not _is_here(urlsplit(url).hostname or "")
    return ClientSession(**{"timeout": ClientTimeout(), "trust_env": is_elsewhere, **options})


def _is_here(host: str) -> bool:
    """Whether it is an address of this machine. Of names only localhost is: to ask for others may take seconds."""
    try:
        ip_address(host)
    except ValueError:
        return host == "localhost"
    return address_here(host) is not None


def address_here(host: str) -> str | None:
    """The address of `host`; None for another machine's, on which no socket can be bound here."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as trial:
            trial.bind(address)
    except OSError:
        return None
    return str(address[0])
