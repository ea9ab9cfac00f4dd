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
    """Dynamo's runtime, with what it would serve at its system port."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.routes: dict[str, Route] = {}

    def register_engine_route(self, path: str, route: Route) -> None:
        self.routes[path] = route

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


async def test_taints_reach_the_card_and_the_next_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards: list[Any] = []
    updates: list[set[str]] = []
    opened: list[KeepsRoutes] = []
    open_runtime = worker_endpoint._open

    def keep_routes(config: WorkerConfig) -> KeepsRoutes:
        opened.append(KeepsRoutes(open_runtime(config)))
        return opened[-1]

    async def register(*_: object, runtime_config: Any, **__: object) -> None:
        cards.append(runtime_config)

    async def update(_: object, taints: set[str]) -> None:
        updates.append(taints)

    async def listed(*_: object) -> None: ...

    monkeypatch.setattr(worker_endpoint, "_open", keep_routes)
    monkeypatch.setattr(worker_endpoint, "register_model", register)
    monkeypatch.setattr(model_taints, "update_model_taints", update)
    monkeypatch.setattr(Runtime, "_list", listed)
    runtime = Runtime(
        WorkerConfig(model="m", role=Role.DECODE, strategy="decode_first", discovery_backend="mem")
    )
    model = ServedModel(16, 8, 1, 64, 64)
    try:
        await runtime.register(model)
        assert not cards[-1].taints
        answer = await opened[0].routes["update/model_taints"]({"taints": ["slow", "slow", "old"]})
        assert answer == {"status": "ok", "taints": ["old", "slow"]}
        assert updates == [{"old", "slow"}]
        # A switch makes the card anew.
        await runtime.register(model)
        assert cards[-1].taints == {"old", "slow"}
        await runtime.register_for_peers(model)
        assert not cards[-1].taints
    finally:
        runtime.shutdown()
