"""The taints of this worker, which Dynamo's router compares with the `routing_constraints` of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.common.model_taints import register_model_taint_route

Route = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Taints:
    """POST /engine/update/model_taints at the system port, as at Dynamo's own worker. Dynamo changes the model card
    that is there now; what it was told is kept for a card that is made later, after a switch.
    """

    def __init__(self, runtime: Any, endpoint: Any) -> None:
        self._runtime = runtime
        self._told: set[str] = set()
        # Dynamo's function takes this object as the runtime.
        register_model_taint_route(self, endpoint)

    def register_engine_route(self, path: str, update: Route) -> None:
        async def update_and_keep(body: dict[str, Any]) -> dict[str, Any]:
            answer = await update(body)
            self._told = set(answer["taints"])
            return answer

        self._runtime.register_engine_route(path, update_and_keep)

    def put_on(self, card: Any) -> None:
        """`card`: Dynamo's ModelRuntimeConfig."""
        if self._told:
            card.taints = self._told
