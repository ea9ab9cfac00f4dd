"""Whether a process serves: asked over HTTP, the way that any other client would."""

from __future__ import annotations

import asyncio
import http.client
import json

from trtllm_disagg.deployment.plan import LOOPBACK, DeploymentConfig, ProcessSpec

TIMEOUT_SECONDS = 2.0
NATS_HEALTH = "/healthz?js-server-only=true"


async def is_ready(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    """The frontend is ready when it lists the model, a worker or NATS when it says so."""
    if spec.http_port is not None:
        return await lists_model(config.client_host, spec.http_port, config.served_model_name)
    if spec.system_port is not None:
        path = NATS_HEALTH if spec.role == "nats" else "/health"
        status, _ = await get(LOOPBACK, spec.system_port, path)
        return status == 200
    return True


async def answers(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    """Whether the frontend answers at all."""
    status, _ = await get(config.client_host, spec.http_port or 0, "/v1/models")
    return status == 200


async def lists_model(host: str, port: int, model: str) -> bool:
    status, body = await get(host, port, "/v1/models")
    return status == 200 and model in _listed_models(body)


async def get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body; status 0 when there is no answer."""
    return await asyncio.to_thread(_get, host, port, path)


def _listed_models(body: bytes) -> list[str]:
    try:
        return [card["id"] for card in json.loads(body)["data"]]
    except (ValueError, TypeError, KeyError):
        return []


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
