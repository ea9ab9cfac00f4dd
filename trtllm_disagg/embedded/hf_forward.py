"""Any decoder of transformers, its modules unmodified, over our attention."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_disagg.embedded.attention import StepLayout
from trtllm_disagg.embedded.kv_pool import KvPool


class HfForward:
    def __init__(self, model: Any, pool: KvPool) -> None:
        self._model = model
        self._device = pool.kv.device

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits of the rows in `layout.last`: (sampling rows, vocabulary)."""
        output = self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=layout.positions,
            use_cache=False,
            # transformers keeps just these positions for the head; softcaps and the like stay theirs.
            logits_to_keep=layout.last,
            paged=layout,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def close(self) -> None:
        """Nothing runs beside it."""
