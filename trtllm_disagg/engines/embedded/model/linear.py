"""nn.Linear with a oneDNN-prepacked weight: faster on the CPU, and in float32 independent of the batch.

torch's own float32 linear gives a row other bits when other rows join it; the prepacked one does not, for any
number of rows from two on. A few rows go through gemm_small_m.py, which reads the same packed weight and gives the same
bits at up to twice the speed; where it does not, one row is computed as two.
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

#: oneDNN has been seen to sum over all inputs at once, or over these many at a time.
_BLOCKS = (512, 1024)
#: From here on oneDNN is as fast, with vectors of AVX-512.
MOST_ROWS = 48
#: oneDNN is asked for a large product: with several threads it may cut the sums of a small one differently.
_PROBE_ROWS = 64
_PROBED = (1, 5)
#: With tiles oneDNN itself sums otherwise for another number of rows: one number of ten thousand is another one, and of
#: those of a weight that is packed otherwise nearly all.
_EQUAL_BY_TILES = 0.98
#: oneDNN packs for products of about so many.
_HINT_ROWS = 8


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight as gemm_small_m.py reads it: where it lies and in which blocks it is summed, proven by trying. It
    does not own the memory: the packed tensor must live as long.
    """

    address: int
    num_panels: int
    #: How many inputs are summed before the sum is added to the total; or `gemm_small_m.as_block`.
    block: int

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, inputs) -> (rows, 64 * panels) float32; what lies beyond the last output is no number of use."""
        out = torch.empty((x.shape[0], self.num_panels * PANEL))
        multiply_by_all(as_array(x), self.address, self.block, out.numpy())
        return out


def panels_of(
    packed: torch.Tensor, dtype: torch.dtype, outputs: int, inputs: int, library: Callable[..., torch.Tensor]
) -> Panels | None:
    """None unless the kernel gives `library`'s bits on this weight. `library` maps (rows, inputs) to (rows, outputs)
    with the same packed weight and no bias.
    """
    is_known = dtype == torch.float32 or (dtype == torch.bfloat16 and this_cpu().has_bfloat16)
    if not is_known or inputs % 2:
        return None
    num_panels = -(-outputs // PANEL)
    try:
        address, nbytes = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    except (AttributeError, RuntimeError):  # operators private to torch
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


def _most_rows() -> float:
    """The most rows of a product that the kernel computes, where it knows the weight. With vectors of AVX2 it is faster
    than oneDNN for any number of rows (docs/log/cpu-kernels.md), if it has as many threads.
    """
    is_faster = this_cpu().level == "avx2" and num_threads() == torch.get_num_threads()
    return math.inf if is_faster else MOST_ROWS


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
            self._packed, weight.dtype, self.out_features, self.in_features, self._by_library
        )
        self._few_rows = 0 if self.panels is None else _most_rows()

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
    """The operators are private to torch, so they are tried before they are relied upon."""
    try:
        linear = nn.Linear(16, 16)
        x = torch.randn(3, 16)
        with torch.inference_mode():
            return torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)
    except (AttributeError, RuntimeError):
        return False
