"""The kernel for a few rows: oneDNN's bits, whatever the shape, or not used at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import may_use_tiles, this_cpu
from trtllm_disagg.engines.embedded.model.linear import MAX_ROWS, PackedLinear, panels_of

SHAPES = [(64, 64), (192, 512), (128, 640), (1000, 96), (128, 1536), (64, 2816), (3, 2)]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def linear(outputs: int, inputs: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    torch.manual_seed(outputs + inputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_packed_row_has_the_same_bits_in_any_batch(outputs: int, inputs: int, bias: bool) -> None:
    packed = PackedLinear(linear(outputs, inputs, torch.float32, bias))
    x = torch.randn(MAX_ROWS + 20, inputs)
    with torch.inference_mode():
        every = packed(x)
        for rows in range(1, MAX_ROWS + 1):
            assert torch.equal(packed(x[:rows]), every[:rows]), rows


@pytest.mark.skipif(not this_cpu().has_bfloat16, reason="this CPU level has no bfloat16 products")
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bfloat16_has_the_librarys_bits_where_the_kernel_is_used(outputs: int, inputs: int) -> None:
    packed = PackedLinear(linear(outputs, inputs, torch.bfloat16))
    if packed.panels is None:
        pytest.skip("the kernel does not give the library's bits here, so it is not used")
    x = torch.randn(20, inputs).to(torch.bfloat16)
    with torch.inference_mode():
        if may_use_tiles():  # where the library sums 20 rows otherwise than one
            assert all(torch.equal(packed(x[i : i + 1]), packed.by_library(x[i : i + 1])) for i in range(20))
        else:
            assert torch.equal(packed(x), packed.by_library(x))


@pytest.mark.skipif(not may_use_tiles(), reason="this CPU has no AMX, or the kernel allows none")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 64), (192, 512), (1000, 96), (128, 1536), (259, 64), (3, 32)]
)
def test_bfloat16_row_has_the_same_bits_in_any_batch_by_tiles(outputs: int, inputs: int, bias: bool) -> None:
    packed = PackedLinear(linear(outputs, inputs, torch.bfloat16, bias))
    assert packed.panels is not None
    x = torch.randn(MAX_ROWS, inputs).to(torch.bfloat16)
    with torch.inference_mode():
        every = packed(x)
        for rows in range(1, MAX_ROWS):
            assert torch.equal(packed(x[:rows]), every[:rows]), rows


@pytest.mark.skipif(not may_use_tiles(), reason="this CPU has no AMX, or the kernel allows none")
def test_a_weight_that_lies_otherwise_is_left_to_the_library() -> None:
    layer, other = (linear(128, inputs, torch.bfloat16, bias=False) for inputs in (64, 64))
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.roll(1, 0).contiguous(), 8)
    assert panels_of(packed, torch.bfloat16, 128, 64, other) is None


def test_a_product_that_it_does_not_reproduce_is_left_to_the_library() -> None:
    layer = linear(128, 64, torch.float32, bias=False)
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.contiguous(), 8)

    def other_bits(x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(layer(x), torch.tensor(100.0))

    assert panels_of(packed, torch.float32, 128, 64, other_bits) is None


#: In one arena of malloc, where memory that a thread gives back too early is another one's at once.
SHARED_ARENA = """
import threading
import numpy as np
from trtllm_disagg.engines.embedded.cpu_kernels.gemm_small_m import PANEL, multiply

INPUTS, ROWS, OUTPUTS, BLOCK = 1536, 20, 256, 1024
random = np.random.default_rng(1)
weight = random.standard_normal(INPUTS * OUTPUTS + 16, np.float32)
address = (weight.ctypes.data + 63) // 64 * 64

def product(x):
    out = np.zeros((ROWS, OUTPUTS), np.float32)
    multiply(x, address, BLOCK, out, 0, OUTPUTS // PANEL)
    return out

inputs = [random.standard_normal((ROWS, INPUTS), np.float32) for _ in range(4)]
expected = [product(x) for x in inputs]
wrong = []

def work(n):
    wrong.extend(n for _ in range(200) if not np.array_equal(product(inputs[n]), expected[n]))

threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(wrong), "wrong")
"""


@pytest.mark.skipif(not this_cpu().compiles, reason="this CPU level has no compiled kernels")
def test_products_of_several_threads_keep_their_sums_while_they_need_them() -> None:
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SHARED_ARENA], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stderr
