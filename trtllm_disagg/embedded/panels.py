"""A packed weight as panel_product.py reads it: where it lies and in which blocks it is summed, proven by trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trtllm_disagg.embedded import panel_product
from trtllm_disagg.embedded.panel_product import PANEL
from trtllm_disagg.embedded.views import as_array

#: oneDNN has been seen to sum over all inputs at once, or over these many at a time.
_BLOCKS = (512, 1024)
#: From here on oneDNN is as fast.
MOST_ROWS = 48
_PROBES = (2, 5)


@dataclass(frozen=True, slots=True)
class Panels:
    """Reads memory that it does not own: the packed tensor must live as long."""

    address: int
    num_panels: int
    inputs: int
    #: How many inputs are summed before the sum is added to the total.
    block: int
    multiply: Callable[..., None]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, inputs) -> (rows, 64 * panels) float32; what lies beyond the last output is no number of use."""
        out = torch.empty((x.shape[0], self.num_panels * PANEL))
        self.multiply(as_array(x), self.address, self.block, out.numpy(), 0, self.num_panels)
        return out


def panels_of(
    packed: torch.Tensor, dtype: torch.dtype, outputs: int, inputs: int, library: Callable[..., torch.Tensor]
) -> Panels | None:
    """None unless the kernel gives `library`'s bits on this weight. `library` maps (rows, inputs) to (rows, outputs)
    with the same packed weight and no bias.
    """
    kernel = _kernel(dtype)
    if kernel is None or inputs % 2:
        return None
    num_panels = -(-outputs // PANEL)
    try:
        address, nbytes = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    except (AttributeError, RuntimeError):  # operators private to torch
        return None
    if nbytes != num_panels * PANEL * inputs * dtype.itemsize:
        return None
    for block in (*_BLOCKS, inputs):
        panels = Panels(address, num_panels, inputs, block, kernel)
        if all(_agrees(panels, rows, dtype, outputs, library) for rows in _PROBES):
            return panels
    return None


def _kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    kernel: Any = None
    if dtype == torch.float32:
        kernel = panel_product.multiply_float32
    elif dtype == torch.bfloat16 and panel_product.has_bfloat16_products():
        kernel = panel_product.multiply_bfloat16
    return kernel  # type: ignore[no-any-return]


def _agrees(
    panels: Panels,
    rows: int,
    dtype: torch.dtype,
    outputs: int,
    library: Callable[..., torch.Tensor],
) -> bool:
    numbers = np.random.default_rng(rows).standard_normal((rows, panels.inputs), np.float32)
    x = torch.from_numpy(numbers).to(dtype)
    return torch.equal(panels.product(x)[:, :outputs].to(dtype), library(x))
