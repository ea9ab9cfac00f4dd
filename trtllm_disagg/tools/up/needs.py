"""What a deployment needs of the limits of this machine."""

from __future__ import annotations

from collections.abc import Iterable

from trtllm_disagg.processes.machine import (
    INOTIFY_PER_FRONTEND,
    INOTIFY_PER_KV_ROUTER,
    INOTIFY_PER_WORKER,
    Needs,
    check_limits,
)
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.plan import DeploymentConfig, worker_total


def needs_of(config: DeploymentConfig) -> Needs:
    spec = spec_of(config.strategy)
    if not spec.is_disaggregated:
        return Needs(INOTIFY_PER_FRONTEND)
    routers = [role for role in spec.kv_routed_roles if config.next_router == "kv"]
    return Needs(
        INOTIFY_PER_FRONTEND
        + INOTIFY_PER_WORKER * worker_total(config)
        + INOTIFY_PER_KV_ROUTER * sum(config.workers[role] for role in routers)
    )


def check_deployment_limits(configs: Iterable[DeploymentConfig]) -> list[str]:
    """`check_limits` for deployments that run side by side."""
    return check_limits(sum(map(needs_of, configs), Needs()))
