"""torch tensors as the arrays that the kernels take."""

from __future__ import annotations

import numpy as np
import torch


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The same memory; bfloat16 as uint16, which is how layer_kernels.py knows it."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: np.ndarray = tensor.numpy()
    return array
