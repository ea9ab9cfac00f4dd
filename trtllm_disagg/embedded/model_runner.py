"""Runs the rows of a step through the model: one fused forward for decode rows and prefill chunks alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from trtllm_disagg.embedded.attention import KvPool, StepLayout
from trtllm_disagg.embedded.scheduler import Row


class ModelRunner:
    def __init__(self, model: torch.nn.Module, pool: KvPool) -> None:
        self._model = model
        self._pool = pool

    @torch.inference_mode()
    def run(self, rows: Seq[Row]) -> torch.Tensor:
        """Logits (sampling rows, vocabulary): one row for each of `rows` that samples, in their order."""
        layout = StepLayout(rows, self._pool)
        tokens = [
            token
            for row in rows
            for token in row.sequence.tokens[
                row.sequence.num_computed : row.sequence.num_computed + row.num_tokens
            ]
        ]
        output = self._model(
            input_ids=torch.tensor([tokens], device=self._pool.kv.device),
            position_ids=layout.positions,
            use_cache=False,
            # transformers keeps just these positions for the head; softcaps and the like stay theirs.
            logits_to_keep=layout.last,
            paged=layout,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
