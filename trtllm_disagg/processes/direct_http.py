"""HTTP requests of commands. A proxy that the environment names is for other machines: it cannot reach a server that
listens on this machine's loopback address.
"""

from __future__ import annotations

from http.client import HTTPResponse
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener


def open_url(request: Request, timeout: float) -> HTTPResponse:
    """The open response, to be closed by the caller. `timeout` in seconds. Raises OSError, and HTTPError for a status
    from 400 on.
    """
    handlers = (ProxyHandler({}),) if _is_loopback(urlsplit(request.full_url).hostname or "") else ()
    response: HTTPResponse = build_opener(*handlers).open(request, timeout=timeout)
    return response


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
