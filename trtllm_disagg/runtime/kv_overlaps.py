"""What the other stage's instances have cached of a prompt, from their own cache events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.llm import KvRouter, KvRouterConfig

from trtllm_disagg.types import GenerateRequest


class KvOverlaps:
    """Dynamo's index. Instances must have a model card, or it hears nothing of them (facts: dynamo.md section 2)."""

    def __init__(self, endpoint: Any, block_size: int) -> None:
        self._router = KvRouter(endpoint, block_size, KvRouterConfig())
        self._block_size = block_size

    async def __call__(self, request: GenerateRequest) -> Mapping[int, int]:
        """Tokens of the prompt, by instance."""
        scores = await self._router.get_overlap_scores(request.token_ids, cache_namespace=request.cache_salt)
        return {
            int(row["worker_id"]): int(row["device_blocks"]) * self._block_size for row in scores["workers"]
        }
