"""Asks the processes of a deployment over HTTP whether they can serve."""

from __future__ import annotations

import json

from trtllm_disagg.deployment.plan import LOOPBACK, DeploymentConfig, ProcessSpec
from trtllm_disagg.processes.direct_http import get

NATS_HEALTH = "/healthz?js-server-only=true"


async def is_ready(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    """A frontend is ready when it lists the model, a worker or NATS when its health check succeeds."""
    if spec.http_port is not None:
        return await lists_model(config.client_host, spec.http_port, config.served_model_name)
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
    host, port = config.client_host, spec.http_port or 0
    return await answers(spec, config) and not await lists_model(host, port, config.served_model_name)


async def lists_model(host: str, port: int, model: str) -> bool:
    status, body = await get(host, port, "/v1/models")
    return status == 200 and model in _listed_models(body)


def _listed_models(body: bytes) -> list[str]:
    try:
        return [card["id"] for card in json.loads(body)["data"]]
    except (ValueError, TypeError, KeyError):
        return []
