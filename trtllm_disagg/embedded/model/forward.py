"""Runs the rows of a step through the model: one fused forward for decode rows and prefill chunks alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import torch

from trtllm_disagg.embedded.kv_cache.pool import KvPool
from trtllm_disagg.embedded.model.attention import StepLayout
from trtllm_disagg.embedded.model.layer_ops import LayerOps
from trtllm_disagg.embedded.model.plain_model import PlainLayer, PlainModel
from trtllm_disagg.embedded.model.rows import ForwardRow


class Forward(Protocol):
    """A model. It knows nothing of requests, phases or disaggregation."""

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits of the rows in `layout.last`: (sampling rows, vocabulary). Valid until the next call."""

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


class PlainForward:
    """Of a plain decoder family on the CPU: four matrix products a layer, one operation between each.

    Same numbers as transformers' own modules (test_families.py), at a fraction of their operations. Where `LayerOps`
    has one, a step in which every row decodes is one compiled call (fused_decode.py).
    """

    def __init__(self, model: PlainModel, pool: KvPool, dtype: torch.dtype, ops: LayerOps) -> None:
        """Computes in `dtype`, as the products of `model` do."""
        self._model = model
        self._dtype = dtype
        self._ops = ops
        self._decode = ops.fused_decode(model, pool, dtype)

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits of the rows in `layout.last`: (sampling rows, vocabulary). Valid until the next step."""
        if self._decode is not None and layout.all_decode and len(tokens) <= self._decode.max_rows:
            return self._decode(tokens, layout)
        model, layers = self._model, self._model.layers
        x = model.embedding[torch.tensor(tokens)].float()
        hidden = torch.empty(x.shape, dtype=self._dtype)
        self._ops.add_rms_norm(x, None, layers[0].input_norm, model.eps, hidden)
        for i, layer in enumerate(layers):
            is_last = i == len(layers) - 1
            # (tokens, hidden) -> (tokens, heads * dim)
            query = self._ops.rotate_and_store(layer.qkv(hidden), layout, i, layer, model)
            attended = layout.attend_stored(layer.attention, query, last_only=is_last)
            attended = attended.view(len(tokens), -1)
            if is_last:
                # Only these rows are sampled from.
                attended, x = attended[layout.last], x[layout.last]
                hidden = torch.empty(x.shape, dtype=self._dtype)
            norm = model.final_norm if is_last else layers[i + 1].input_norm
            self._feed_forward(layer, attended, x, hidden, norm)
        logits: torch.Tensor = model.head(hidden)
        return logits

    def close(self) -> None:
        if self._decode is not None:
            self._decode.close()

    def _feed_forward(
        self,
        layer: PlainLayer,
        attended: torch.Tensor,
        residual: torch.Tensor,
        hidden: torch.Tensor,
        next_norm: np.ndarray,
    ) -> None:
        """Adds attention and feed-forward to the residual; `hidden` becomes the next layer's normalised input."""
        ops, eps = self._ops, self._model.eps
        ops.add_rms_norm(residual, layer.output(attended), layer.post_norm, eps, hidden)
        activated = ops.silu_mul(layer.gate_up(hidden))
        ops.add_rms_norm(residual, layer.down(activated), next_norm, eps, hidden)
