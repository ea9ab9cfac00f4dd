"""Products by tiles, of numbers with exact sums."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import may_use_tiles
from trtllm_disagg.engines.embedded.cpu_kernels.gemm_small_m import multiply_tiles

pytestmark = pytest.mark.skipif(not may_use_tiles(), reason="this CPU has no AMX, or the kernel allows none")


def bfloat16(numbers: np.ndarray) -> np.ndarray:
    """As uint16."""
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def panels_of_32(weight: np.ndarray) -> np.ndarray:
    """(outputs, inputs) -> a line of 32 outputs' pairs for each pair of inputs, panel by panel."""
    outputs, inputs = weight.shape
    lines = bfloat16(weight).reshape(outputs // 32, 32, inputs // 2, 2)
    return np.ascontiguousarray(lines.transpose(0, 2, 1, 3))


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 48, 65])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (96, 64), (128, 512)])
def test_product_by_tiles_is_exact(rows: int, outputs: int, inputs: int) -> None:
    random = np.random.default_rng(rows)
    x, weight = random.integers(-8, 9, (rows, inputs)), random.integers(-8, 9, (outputs, inputs))
    packed, out = panels_of_32(weight), np.full((rows, outputs + 16), -1.0, np.float32)
    multiply_tiles(bfloat16(x), packed.ctypes.data, out, 0, outputs // 32)
    assert np.array_equal(out[:, :outputs], x @ weight.T)
    assert (out[:, outputs:] == -1.0).all()


def test_only_the_panels_that_are_asked_for_are_written() -> None:
    x, weight = np.ones((3, 32)), np.ones((128, 32))
    packed, out = panels_of_32(weight), np.zeros((3, 128), np.float32)
    multiply_tiles(bfloat16(x), packed.ctypes.data, out, 1, 3)
    assert (out[:, 32:96] == 32.0).all()
    assert not out[:, :32].any()
    assert not out[:, 96:].any()
