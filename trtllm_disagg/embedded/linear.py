"""nn.Linear with a oneDNN-prepacked weight: faster on the CPU, and in float32 independent of the batch.

torch's own float32 linear gives a row other bits when other rows join it; the prepacked one does not, for any
number of rows from two on (facts: engine.md section 1b). A few rows go through our own kernel, which reads the same
packed weight and gives the same bits at up to twice the speed; where it does not, one row is computed as two.
"""

from __future__ import annotations

import torch
from torch import nn

from trtllm_disagg.embedded.panels import MOST_ROWS, Panels, panels_of

_HINT_ROWS = 8


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear, dtype: torch.dtype | None = None) -> None:
        """Computes in `dtype`; None: in the weights' own."""
        super().__init__()
        dtype = dtype or linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Model code looks at weight.dtype; the numbers themselves are only in the packed copy.
        self.weight = linear.weight.detach().to("meta", dtype)
        # A copy: one number that stays in the mapped file keeps all of it in memory.
        self.bias_values: torch.Tensor | None = (
            None if linear.bias is None else linear.bias.detach().to(dtype, copy=True)
        )
        weight = linear.weight.detach().to(dtype).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _HINT_ROWS)
        self._pad_single_row = weight.dtype == torch.float32
        #: None: the kernel does not know this weight's layout.
        self.panels: Panels | None = panels_of(
            self._packed, weight.dtype, self.out_features, self.in_features, self._library_product
        )
        self._few_rows = MOST_ROWS if self.panels is not None else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        shape = (*x.shape[:-1], self.out_features)
        if rows.shape[0] == 0:  # a step in which no row samples
            return x.new_empty(shape)
        if rows.shape[0] <= self._few_rows:
            return self._panel_product(rows.contiguous()).to(x.dtype).view(shape)
        if self._pad_single_row and rows.shape[0] == 1:
            return self._library(rows.expand(2, -1).contiguous())[:1].view(shape)
        return self._library(rows).view(shape)

    def _panel_product(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.panels is not None
        out = self.panels.product(rows)[:, : self.out_features]
        return out if self.bias_values is None else out + self.bias_values

    def _library(self, rows: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias_values, "none", [], ""
        )
        return y

    def _library_product(self, rows: torch.Tensor) -> torch.Tensor:
        """Without the bias."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, None, "none", [], "")
        return y


def packing_works() -> bool:
    """The operators are private to torch, so they are tried before they are relied upon."""
    try:
        linear = nn.Linear(16, 16)
        x = torch.randn(3, 16)
        with torch.inference_mode():
            return torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)
    except (AttributeError, RuntimeError):
        return False
