"""Asks the processes of a deployment over HTTP whether they can serve."""

from __future__ import annotations

import json

from trtllm_disagg.tools.http import get
from trtllm_disagg.tools.up.plan import LOOPBACK, DeploymentConfig, ProcessSpec

NATS_HEALTH = "/healthz?js-server-only=true"
#: A model may be served at one of them only.
REQUEST_PATHS = ("/v1/chat/completions", "/v1/completions")


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
    return status == 200 and model in _listed_models(body)


async def _is_open(host: str, port: int) -> bool:
    """Whether the frontend has a path for requests. Dynamo opens it a moment after it lists the model: 404 before."""
    statuses = [(await get(host, port, path))[0] for path in REQUEST_PATHS]
    return any(status not in (0, 404) for status in statuses)


def _listed_models(body: bytes) -> list[str]:
    try:
        return [card["id"] for card in json.loads(body)["data"]]
    except (ValueError, TypeError, KeyError):
        return []
