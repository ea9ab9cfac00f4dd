"""Measures the hardware's limits (roofs): memory bandwidth and matrix products, with a number of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit
from torch.nn.functional import linear

from trtllm_disagg.tools.bench.engine.measurement_plan import computed_in
from trtllm_disagg.tools.bench.machine import seconds_of

if TYPE_CHECKING:
    from trtllm_disagg.tools.bench.engine.contestants import Start

#: Many times the size of any cache.
_READ_BYTES = 256 << 20
_ROWS, _FEATURES = 512, 2048
_HINT_ROWS = 512
_BEST_OF = 3


@njit(nogil=True, fastmath=True, cache=True)
def _sum(numbers: Any) -> Any:
    total = np.float32(0.0)
    for i in range(numbers.shape[0]):
        total += numbers[i]
    return total


class Roofs:
    """Measures roofs, each as the best of several implementations and several runs."""

    def __init__(self, start: Start) -> None:
        torch.set_num_threads(start.threads)
        self._threads = start.threads
        self._pool = ThreadPoolExecutor(start.threads)
        self._numbers = np.ones(_READ_BYTES // 4, np.float32)
        self._tensor = torch.from_numpy(self._numbers)
        dtype = getattr(torch, computed_in(start.dtype))
        self._x = torch.randn(_ROWS, _FEATURES).to(dtype)
        self._weight = torch.randn(_FEATURES, _FEATURES).to(dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, _HINT_ROWS)
        # A matrix-vector product is also limited by reading memory.
        self._gemv = partial(torch.mv, self._tensor.view(-1, _FEATURES), torch.ones(_FEATURES))

    def read(self) -> float:
        """GB/s."""
        return _READ_BYTES / 1e9 / _best(self._sum_in_threads, self._tensor.sum, self._gemv)

    def multiply(self) -> float:
        """GFLOP/s of a 512 x 2048 x 2048 product in the dtype of computation."""
        plain = partial(linear, self._x, self._weight)
        packed = partial(torch.ops.mkldnn._linear_pointwise, self._x, self._packed, None, "none", [], "")
        with torch.inference_mode():
            return 2e-9 * _ROWS * _FEATURES**2 / _best(plain, packed)

    def close(self) -> None:
        self._pool.shutdown()

    def _sum_in_threads(self) -> object:
        return list(self._pool.map(_sum, np.array_split(self._numbers, self._threads)))


def _best(*ways: Callable[[], object]) -> float:
    """Seconds."""
    return min(seconds_of(way) for _ in range(_BEST_OF) for way in ways)
