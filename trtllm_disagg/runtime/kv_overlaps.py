"""What the other stage's instances have cached of a prompt, from their own cache events."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dynamo.llm import KvRouter, KvRouterConfig

from trtllm_disagg.types import GenerateRequest

log = logging.getLogger(__name__)


class KvOverlaps:
    """Dynamo's index. Instances must have a model card, or it hears nothing of them (facts: dynamo.md section 2)."""

    def __init__(self, endpoint: Any, block_size: int) -> None:
        self._endpoint = endpoint
        self._block_size = block_size

    @cached_property
    def _router(self) -> Any:
        """Watches discovery and listens to everybody, so whoever never asks makes none."""
        return KvRouter(self._endpoint, self._block_size, KvRouterConfig())

    def listen(self) -> None:
        """From now on, and not from the first request on."""
        try:
            _ = self._router
        except Exception as error:
            log.warning("no KV router yet, the first request will try again: %s", error)

    async def __call__(self, request: GenerateRequest) -> Mapping[int, int]:
        """Tokens of the prompt, by instance. Raises what Dynamo raises."""
        scores = await self._router.get_overlap_scores(request.token_ids, cache_namespace=request.cache_salt)
        cached: dict[int, int] = {}
        for row in scores["workers"]:  # one for each rank of attention DP
            tokens = row["device_blocks"] * self._block_size
            cached[row["worker_id"]] = max(tokens, cached.get(row["worker_id"], 0))
        return cached
