"""A packed weight as panel_product.py reads it: where it lies and in which blocks it is summed, proven by trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trtllm_disagg.embedded import panel_product
from trtllm_disagg.embedded.cpu import this_cpu
from trtllm_disagg.embedded.panel_product import PANEL
from trtllm_disagg.embedded.views import as_array

#: oneDNN has been seen to sum over all inputs at once, or over these many at a time.
_BLOCKS = (512, 1024)
#: From here on oneDNN is as fast.
MOST_ROWS = 48
#: oneDNN is asked for a large product: with several threads it may cut the sums of a small one differently.
_PROBE_ROWS = 64
_PROBED = (1, 5)


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
    numbers = np.random.default_rng(0).standard_normal((_PROBE_ROWS, inputs), np.float32)
    x = torch.from_numpy(numbers).to(dtype)
    expected = library(x)
    for block in (*_BLOCKS, inputs):
        panels = Panels(address, num_panels, inputs, block, kernel)
        if all(
            torch.equal(panels.product(x[:rows])[:, :outputs].to(dtype), expected[:rows]) for rows in _PROBED
        ):
            return panels
    return None


def _kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    kernel: Any = None
    if dtype == torch.float32:
        kernel = panel_product.multiply_float32
    elif dtype == torch.bfloat16 and this_cpu().has_bfloat16:
        kernel = panel_product.multiply_bfloat16
    return kernel  # type: ignore[no-any-return]
