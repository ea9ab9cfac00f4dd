"""nn.Linear with a oneDNN-prepacked weight: faster on the CPU, and in float32 independent of the batch.

torch's float32 linear gives a row other bits when other rows join it; the prepacked one does not, from two rows on.
gemm_small_m.py computes few rows from the same packed weight, with the same bits at up to twice the speed; where it
cannot, one row is computed as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import may_use_tiles, this_cpu
from trtllm_disagg.engines.embedded.cpu_kernels.gemm_small_m import (
    PANEL,
    TILE_INPUTS,
    TILE_PANEL,
    as_block,
    multiply_by_all,
)
from trtllm_disagg.engines.embedded.cpu_kernels.layer_kernels import as_array
from trtllm_disagg.engines.embedded.cpu_kernels.parallel import num_threads

#: oneDNN sums over all inputs at once, or over this many at a time.
_BLOCKS = (512, 1024)
#: With AVX-512, oneDNN is as fast from here on.
MAX_ROWS = 48
#: A large product: with several threads oneDNN may split the sums of a small one differently.
_PROBE_ROWS = 64
_PROBED = (1, 5)
#: With AMX tiles oneDNN's sums depend on the number of rows: one number in ten thousand differs. With another packing
#: nearly all differ.
_EQUAL_BY_TILES = 0.98
#: The number of rows that oneDNN packs for.
_HINT_ROWS = 8


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight as gemm_small_m.py reads it: its address and summation block, proven by trying. The packed tensor
    owns the memory and must outlive it.
    """

    address: int
    num_panels: int
    #: Number of inputs summed before adding to the total; or `gemm_small_m.as_block`.
    block: int

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, inputs) -> (rows, 64 * panels) float32; ignore columns beyond the last output."""
        out = torch.empty((x.shape[0], self.num_panels * PANEL))
        multiply_by_all(as_array(x), self.address, self.block, out.numpy())
        return out


def panels_of(
    packed: torch.Tensor, dtype: torch.dtype, outputs: int, inputs: int, library: Callable[..., torch.Tensor]
) -> Panels | None:
    """None unless the kernel reproduces the bits of `library`, which maps (rows, inputs) to (rows, outputs) with the
    same packed weight and no bias.
    """
    is_known = dtype == torch.float32 or (dtype == torch.bfloat16 and this_cpu().has_bfloat16)
    if not is_known or inputs % 2:
        return None
    num_panels = -(-outputs // PANEL)
    try:
        address, nbytes = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    except (AttributeError, RuntimeError):  # torch's private operators
        return None
    by_tiles = dtype == torch.bfloat16 and may_use_tiles()
    width = TILE_PANEL if by_tiles else PANEL
    if nbytes != -(-outputs // width) * width * inputs * dtype.itemsize:
        return None
    numbers = np.random.default_rng(0).standard_normal((_PROBE_ROWS, inputs), np.float32)
    x = torch.from_numpy(numbers).to(dtype)
    expected = library(x)
    if by_tiles:
        tiled = Panels(address, num_panels, as_block(outputs))
        fits = inputs % TILE_INPUTS == 0 and _share_of_equal(tiled, x, expected) >= _EQUAL_BY_TILES
        return tiled if fits else None
    for block in (*_BLOCKS, inputs):
        panels = Panels(address, num_panels, block)
        if all(
            torch.equal(panels.product(x[:rows])[:, :outputs].to(dtype), expected[:rows]) for rows in _PROBED
        ):
            return panels
    return None


def _share_of_equal(panels: Panels, x: torch.Tensor, expected: torch.Tensor) -> float:
    made = panels.product(x)[:, : expected.shape[1]].to(x.dtype)
    return (made == expected).double().mean().item()


def _max_rows() -> float:
    """Maximum rows for which the kernel replaces oneDNN. With AVX2 and as many threads it is faster for any number
    (docs/log/cpu-kernels.md).
    """
    is_faster = this_cpu().level == "avx2" and num_threads() == torch.get_num_threads()
    return math.inf if is_faster else MAX_ROWS


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear, dtype: torch.dtype | None = None) -> None:
        """Computes in `dtype`; None: in the weights' dtype."""
        super().__init__()
        dtype = dtype or linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Model code reads weight.dtype; only the packed copy has the numbers.
        self.weight = linear.weight.detach().to("meta", dtype)
        # A copy: a view would keep the whole mapped file in memory.
        self.bias_values: torch.Tensor | None = (
            None if linear.bias is None else linear.bias.detach().to(dtype, copy=True)
        )
        weight = linear.weight.detach().to(dtype).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _HINT_ROWS)
        self._pad_single_row = weight.dtype == torch.float32
        #: None: the kernel does not know this weight's layout.
        self.panels: Panels | None = panels_of(
            self._packed, weight.dtype, self.out_features, self.in_features, self._by_library
        )
        self._few_rows = 0 if self.panels is None else _max_rows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        shape = (*x.shape[:-1], self.out_features)
        if rows.shape[0] == 0:  # a step in which no row samples
            return x.new_empty(shape)
        if rows.shape[0] <= self._few_rows:
            return self._panel_product(rows.contiguous()).to(x.dtype).view(shape)
        if self._pad_single_row and rows.shape[0] == 1:
            return self.by_library(rows.expand(2, -1).contiguous())[:1].view(shape)
        return self.by_library(rows).view(shape)

    def _panel_product(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.panels is not None
        out = self.panels.product(rows)[:, : self.out_features]
        return out if self.bias_values is None else out.add_(self.bias_values)

    def by_library(self, rows: torch.Tensor) -> torch.Tensor:
        return self._by_library(rows, self.bias_values)

    def _by_library(self, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return y


def packing_works() -> bool:
    """Tries torch's private operators before anything relies on them."""
    try:
        linear = nn.Linear(16, 16)
        x = torch.randn(3, 16)
        with torch.inference_mode():
            return torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)
    except (AttributeError, RuntimeError):
        return False
