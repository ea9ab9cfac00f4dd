"""HTTP requests of commands, and by them whether the processes of a deployment can serve.

A proxy that the environment names is for other machines: it cannot reach a server that listens on this machine's
loopback address, and perhaps not one on another address of this machine.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trtllm_disagg.tools.up.plan import LOOPBACK, DeploymentConfig, ProcessSpec

if TYPE_CHECKING:
    from aiohttp import ClientSession

#: Of `get`.
TIMEOUT_SECONDS = 2.0
#: Of an answer that is read as a whole. The metrics of a large deployment are some megabytes.
MOST_BYTES = 64 << 20
NATS_HEALTH = "/healthz?js-server-only=true"
#: A model may be served at one of them only.
REQUEST_PATHS = ("/v1/chat/completions", "/v1/completions")


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


async def is_ready(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    """A frontend is ready when it serves the model, a worker or NATS when its health check succeeds."""
    if spec.http_port is not None:
        host, port = config.client_host, spec.http_port
        return await lists_model(host, port, config.served_model_name) and await _is_open(host, port)
    if spec.system_port is not None:
        path = NATS_HEALTH if spec.role == "nats" else "/health"
        status, _ = await get(LOOPBACK, spec.system_port, path)
        return status == 200
    return True


async def answers(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    """Whether the frontend answers, even without a model."""
    status, _ = await get(config.client_host, spec.http_port or 0, "/v1/models")
    return status == 200


async def lacks_model(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    """Whether the frontend answers, and would refuse each request: it knows no worker that takes them."""
    return await answers(spec, config) and not await is_ready(spec, config)


async def lists_model(host: str, port: int, model: str) -> bool:
    status, body = await get(host, port, "/v1/models")
    try:
        return status == 200 and any(card["id"] == model for card in json.loads(body)["data"])
    except (ValueError, TypeError, KeyError):
        return False


async def _is_open(host: str, port: int) -> bool:
    """Whether the frontend has a path for requests. Dynamo opens it a moment after it lists the model: 404 before."""
    statuses = [(await get(host, port, path))[0] for path in REQUEST_PATHS]
    return any(status not in (0, 404) for status in statuses)
