"""The taints of a worker, told at its system port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from dynamo.common import model_taints

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime import worker_endpoint
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime, ServedModel

Route = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class KeepsRoutes:
    """In place of Dynamo's runtime and of its endpoints: keeps what they would serve at the system port."""

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}

    def endpoint(self, name: str) -> KeepsRoutes:
        return KeepsRoutes()

    def connection_id(self) -> int:
        return 1

    def register_engine_route(self, path: str, route: Route) -> None:
        self.routes[path] = route

    async def serve_endpoint(self, *_: object, **__: object) -> None: ...


async def test_taints_reach_the_card_and_the_next_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards: list[Any] = []
    updates: list[set[str]] = []

    async def register(*_: object, runtime_config: Any, **__: object) -> None:
        cards.append(runtime_config)

    async def update(_: object, taints: set[str]) -> None:
        updates.append(taints)

    monkeypatch.setattr(worker_endpoint, "register_model", register)
    monkeypatch.setattr(model_taints, "update_model_taints", update)
    dynamo = KeepsRoutes()
    config = WorkerConfig(model="m", role=Role.DECODE, strategy="decode_first")
    runtime = Runtime(config, runtime=dynamo)
    model = ServedModel(16, 8, 1, 64, 64)
    await runtime.register(model)
    assert not cards[-1].taints
    answer = await dynamo.routes["update/model_taints"]({"taints": ["slow", "slow", "old"]})
    assert answer == {"status": "ok", "taints": ["old", "slow"]}
    assert updates == [{"old", "slow"}]
    # A switch makes the card anew.
    await runtime.register(model)
    assert cards[-1].taints == {"old", "slow"}
    await runtime.register_for_peers(model)
    assert not cards[-1].taints
