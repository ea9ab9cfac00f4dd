"""Runs the rows of a step through the model: one fused forward for decode rows and prefill chunks alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch

from trtllm_disagg.embedded.kv_cache.memory import KvPool
from trtllm_disagg.embedded.model.attention import StepLayout
from trtllm_disagg.embedded.model.layer_ops import LayerOps
from trtllm_disagg.embedded.model.row import ForwardRow


class Forward(Protocol):
    """A model. It knows nothing of requests, phases or disaggregation."""

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits of the rows in `layout.last`: (sampling rows, vocabulary). Valid until the next call."""
        ...

    def close(self) -> None: ...


class ModelRunner:
    def __init__(self, forward: Forward, pool: KvPool, ops: LayerOps) -> None:
        self._forward = forward
        self._pool = pool
        self._ops = ops

    @property
    def tokens_per_block(self) -> int:
        return self._pool.tokens_per_block

    @torch.inference_mode()
    def run(self, rows: Seq[ForwardRow]) -> torch.Tensor:
        """Logits (sampling rows, vocabulary): one row for each of `rows` that samples, in their order."""
        tokens = [token for row in rows for token in row.tokens]
        return self._forward(tokens, StepLayout(rows, self._pool, self._ops.decode_rows(rows, self._pool)))

    def close(self) -> None:
        self._forward.close()


class HfForward:
    """Any decoder of transformers, its modules unmodified, over our attention."""

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
