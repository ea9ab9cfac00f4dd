"""A lean forward for the plain decoder families on the CPU: four matrix products a layer, one operation between each.

Same numbers as transformers' own modules (test_families.py), at a fraction of their operations. Where `LayerOps` has
one, a step in which every row decodes is one compiled call (fused_decode.py). Other families: `model_runner.py`.
"""

from __future__ import annotations

import numpy as np
import torch

from trtllm_disagg.embedded.kv_cache.memory import KvPool
from trtllm_disagg.embedded.model.attention import StepLayout
from trtllm_disagg.embedded.model.layer_ops import LayerOps
from trtllm_disagg.embedded.model.plain_model import PlainLayer, PlainModel


class PlainForward:
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
            attended = layout.attend_stored(i, query, layer.scale, layer.window, last_only=is_last)
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
