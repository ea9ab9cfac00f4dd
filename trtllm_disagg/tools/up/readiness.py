"""Asks the processes of a deployment over HTTP whether they can serve, and waits for what comes first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from trtllm_disagg.tools.up.http import get
from trtllm_disagg.tools.up.plan import LOOPBACK, DeploymentConfig, ProcessSpec

NATS_HEALTH = "/healthz?js-server-only=true"
#: A model may be served at one of them only.
REQUEST_PATHS = ("/v1/chat/completions", "/v1/completions")

First = TypeVar("First")
Second = TypeVar("Second")


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


async def first_completed(
    first: Coroutine[Any, Any, First], second: Coroutine[Any, Any, Second], timeout: float | None = None
) -> First | Second | None:
    """The result of the one that ends first, the second one when both did; None after `timeout` seconds.

    The other one is cancelled, and over, before this returns.
    """
    a, b = asyncio.create_task(first), asyncio.create_task(second)
    try:
        await asyncio.wait((a, b), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        a.cancel()
        b.cancel()
        await asyncio.gather(a, b, return_exceptions=True)
    if not b.cancelled():
        return b.result()
    return None if a.cancelled() else a.result()
