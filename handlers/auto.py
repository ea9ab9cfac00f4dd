"""`--disaggregation-strategy auto`: the order of each request by its length, by queues and by who is well."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from trtllm_disagg.handlers.deciding import Decider
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


class Auto:
    """local: little to compute, a queue in front of the other stage, or nobody there who is well.

    Otherwise the order whose first stage this worker is; the other order when this worker decodes as much as fits
    into its batch, so that another decode worker can be found.
    """

    def __init__(
        self,
        decider: Decider,
        ways: dict[str, Generate],
        orders: tuple[str, str],
        num_well: Callable[[], int],
        max_batch_size: int,
    ) -> None:
        """`orders`: this worker's own, and the other one."""
        self._decider = decider
        self._ways = ways
        self._own, self._other = orders
        self._num_well = num_well
        self._room = max_batch_size
        self._running = 0

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        name, reason = self._chosen(request)
        request.journey.chose(name, f"auto_{reason}")
        self._running += 1
        try:
            async with aclosing(self._ways[name](request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._running -= 1

    def _chosen(self, request: GenerateRequest) -> tuple[str, str]:
        decision = self._decider.decide(request)
        if not decision.remote:
            return "local", decision.reason
        if self._num_well() == 0:
            return "local", "no_peer"
        if self._running >= self._room:
            return self._other, "busy"
        return self._own, decision.reason
