"""HTTP requests of commands, and the readiness checks of a deployment.

Requests to this machine bypass the environment's proxy, which cannot reach loopback, and perhaps no other address here.
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

#: Timeout of `get`.
TIMEOUT_SECONDS = 2.0
#: Max size of a body. Metrics of a large deployment take a few megabytes.
MAX_BYTES = 64 << 20
NATS_HEALTH = "/healthz?js-server-only=true"


async def get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body from a server on this machine; status 0 without a complete answer in TIMEOUT_SECONDS."""
    place = f"[{host}]" if ":" in host else host
    try:
        return await ask(f"http://{place}:{port}{path}", TIMEOUT_SECONDS)
    except OSError:
        return 0, b""


async def ask(
    url: str, seconds: float, body: object = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST of `body` as JSON. Raises OSError without a complete answer of at most
    MAX_BYTES within `seconds`.
    """
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
                if len(whole) > MAX_BYTES:
                    raise OSError(f"an answer of more than {MAX_BYTES >> 20} MiB")
            return response.status, bytes(whole)
    except TimeoutError:
        raise TimeoutError(f"no whole answer within {seconds:g} s") from None
    except ClientConnectorError as error:
        raise error.os_error from None
    except ClientError as error:
        raise OSError(str(error)) from error


def session(url: str, **options: Any) -> ClientSession:
    """A session for `url` with aiohttp's `options`, without its timeouts."""
    from aiohttp import ClientSession, ClientTimeout

    is_elsewhere = not _is_here(urlsplit(url).hostname or "")
    return ClientSession(**{"timeout": ClientTimeout(), "trust_env": is_elsewhere, **options})


def _is_here(host: str) -> bool:
    """Whether this machine has the address. Of names, only localhost counts, since lookups may take seconds."""
    try:
        ip_address(host)
    except ValueError:
        return host == "localhost"
    return address_here(host) is not None


def address_here(host: str) -> str | None:
    """Address of `host`; None if no socket can be bound to it here."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as trial:
            trial.bind(address)
    except OSError:
        return None
    return str(address[0])


def prompts(text: str) -> dict[str, dict[str, Any]]:
    """Path -> the part of a body with the prompt. A model may be served at only one of them."""
    chat = {"messages": [{"role": "user", "content": text}]}
    return {"/v1/completions": {"prompt": text}, "/v1/chat/completions": chat}


async def is_ready(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    """A frontend is ready when it serves the model; a worker or NATS when its health check succeeds."""
    if spec.http_port is not None:
        host, port = config.client_host, spec.http_port
        return await lists_model(host, port, config.served_model_name) and await _is_open(host, port)
    if spec.system_port is not None:
        path = NATS_HEALTH if spec.role == "nats" else "/health"
        status, _ = await get(LOOPBACK, spec.system_port, path)
        return status == 200
    return True


async def answers(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    """Whether the frontend answers, with or without a model."""
    status, _ = await get(config.client_host, spec.http_port or 0, "/v1/models")
    return status == 200


async def lacks_model(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    """Whether the frontend answers, but knows no worker that takes requests."""
    return await answers(spec, config) and not await is_ready(spec, config)


async def lists_model(host: str, port: int, model: str) -> bool:
    status, body = await get(host, port, "/v1/models")
    try:
        return status == 200 and any(card["id"] == model for card in json.loads(body)["data"])
    except (ValueError, TypeError, KeyError):
        return False


async def _is_open(host: str, port: int) -> bool:
    """Whether the frontend has opened a path for requests, which Dynamo does shortly after it lists the model."""
    statuses = [(await get(host, port, path))[0] for path in prompts("")]
    return any(status not in (0, 404) for status in statuses)
