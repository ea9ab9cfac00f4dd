"""A lean forward for the plain decoder families on the CPU: four matrix products a layer, one kernel between each.

Same numbers as transformers' own modules (tests/unit/test_families.py), at a fraction of their operations. A step in
which every row decodes is one compiled call (fused_decode.py). Whatever it does not know runs through
`hf_forward.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trtllm_disagg.activity import Reporter
from trtllm_disagg.embedded import attend_kernels, kernels
from trtllm_disagg.embedded.attention import StepLayout
from trtllm_disagg.embedded.fused_decode import FusedDecode
from trtllm_disagg.embedded.kv_pool import KvPool
from trtllm_disagg.embedded.pack import Pack
from trtllm_disagg.embedded.panels import MOST_ROWS
from trtllm_disagg.embedded.plain_model import PlainLayer, take_apart
from trtllm_disagg.embedded.views import as_array


class PlainForward:
    def __init__(
        self,
        model: Any,
        pool: KvPool,
        max_positions: int,
        dtype: torch.dtype,
        pack: Pack,
        reporter: Reporter | None = None,
    ) -> None:
        """Takes `model` apart: it cannot be used afterwards. Computes in `dtype`, as the products of `pack` do."""
        kv_heads, self._head_dim = pool.kv.shape[-2:]
        attend_kernels.compile_heads_ahead(as_array(torch.zeros(1, 1, 1, dtype=dtype)), as_array(pool.rows))
        self._model = take_apart(model, max_positions, kv_heads, self._head_dim, pack, reporter)
        self._dtype = dtype
        self._pool = pool
        self._decode = FusedDecode.create(self._model, pool, dtype, torch.get_num_threads())

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits of the rows in `layout.last`: (sampling rows, vocabulary). Valid until the next step."""
        if self._decode is not None and layout.all_decode and len(tokens) <= MOST_ROWS:
            return self._decode(tokens, layout)
        model = self._model
        x = model.embedding[torch.tensor(tokens)].float()
        residual = as_array(x)
        hidden = torch.empty(x.shape, dtype=self._dtype)
        kernels.rms_norm(residual, model.layers[0].input_norm, model.eps, as_array(hidden))
        for i, layer in enumerate(model.layers):
            is_last = i == len(model.layers) - 1
            attended = self._attend(i, layer, hidden, layout, last_only=is_last)
            if is_last:
                # Nobody looks at the other rows any more.
                attended, x = attended[layout.last], x[layout.last]
                residual, hidden = as_array(x), torch.empty(x.shape, dtype=self._dtype)
            norm = model.layers[i + 1].input_norm if i + 1 < len(model.layers) else model.final_norm
            self._feed_forward(layer, attended, residual, hidden, norm)
        logits: torch.Tensor = model.head(hidden)
        return logits

    def close(self) -> None:
        if self._decode is not None:
            self._decode.close()

    def _attend(
        self, i: int, layer: PlainLayer, hidden: torch.Tensor, layout: StepLayout, *, last_only: bool
    ) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, heads * dim); the tokens' K and V are in the pool afterwards."""
        qkv = layer.qkv(hidden)
        query = torch.empty((len(qkv), self._model.num_heads, self._head_dim), dtype=self._dtype)
        kernels.rotate_and_store(
            as_array(qkv),
            layout.position_array,
            layout.place_array,
            self._model.cos,
            self._model.sin,
            layer.q_norm,
            layer.k_norm,
            self._model.eps,
            as_array(self._pool.rows),
            self._pool.key_row(i),
            self._pool.value_row(i),
            as_array(query),
        )
        attended = layout.attend_stored(i, query, layer.scale, layer.window, last_only=last_only)
        return attended.view(len(qkv), -1)

    def _feed_forward(
        self,
        layer: PlainLayer,
        attended: torch.Tensor,
        residual: np.ndarray,
        hidden: torch.Tensor,
        next_norm: np.ndarray,
    ) -> None:
        """Adds attention and feed-forward to the residual; `hidden` becomes the next layer's normalised input."""
        normalised = as_array(hidden)
        delta = layer.output(attended)
        kernels.add_rms_norm(residual, as_array(delta), layer.post_norm, self._model.eps, normalised)
        gate_up = layer.gate_up(hidden)
        activated = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=self._dtype)
        kernels.silu_mul(as_array(gate_up), as_array(activated), 0, activated.shape[1])
        delta = layer.down(activated)
        kernels.add_rms_norm(residual, as_array(delta), next_norm, self._model.eps, normalised)
