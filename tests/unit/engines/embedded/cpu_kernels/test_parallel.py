"""Kernels in parts, which several threads compute: every part once, and the same bits as on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from trtllm_disagg.engines.embedded.cpu_kernels import gemm_small_m, layer_kernels, parallel
from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compiled
from trtllm_disagg.engines.embedded.cpu_kernels.layer_kernels import ROWS_OF_A_PART, as_array, parts_of

WIDTH, HEADS, KV_HEADS, DIM = 192, 4, 2, 32
QKV = (HEADS + 2 * KV_HEADS) * DIM
MANY = 3 * ROWS_OF_A_PART + 5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EPS = np.float32(1e-5)


@compiled(inner=True)
def add_part(part: Any, counts: Any) -> None:
    counts[part] += part


add_in_parts = parallel.in_parts(add_part)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return as_array(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype))


def assert_same_bits_for_any_threads_and_rows(compute: Callable[[slice], list[np.ndarray]]) -> None:
    """`compute` gives what a kernel makes of these of MANY rows."""
    torch.set_num_threads(1)
    alone = [
        np.concatenate(each) for each in zip(*(compute(slice(r, r + 1)) for r in range(MANY)), strict=True)
    ]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (slice(MANY), slice(ROWS_OF_A_PART), slice(1, ROWS_OF_A_PART + 2), slice(40, MANY)):
            for made, expected in zip(compute(rows), alone, strict=True):
                assert np.array_equal(made, expected[rows]), (threads, rows)


def test_torch_has_threads_for_parts_here() -> None:
    torch.set_num_threads(2)
    assert parallel.num_threads() == 2


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("parts", [0, 1, 2, 7, 1000])
def test_every_part_is_computed_once(parts: int, threads: int) -> None:
    torch.set_num_threads(threads)
    counts = np.zeros(1000, np.int64)
    add_in_parts(parts, counts)
    assert counts.tolist() == [*range(parts), *([0] * (1000 - parts))]


def test_one_thread_computes_every_part_where_torch_has_another_openmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "GOMP_PARALLEL", 0)
    torch.set_num_threads(2)
    assert parallel.num_threads() == 1
    counts = np.zeros(1000, np.int64)
    add_in_parts(1000, counts)
    assert counts.tolist() == list(range(1000))


@DTYPES
def test_norm_has_the_same_bits_for_any_threads_and_rows(dtype: torch.dtype) -> None:
    x, weight = random(MANY, WIDTH), random(WIDTH)

    def compute(rows: slice) -> list[np.ndarray]:
        out = random(MANY, WIDTH, dtype=dtype)[rows].copy()
        layer_kernels.rms_norm_in_parts(parts_of(len(out)), x[rows].copy(), weight, EPS, out)
        return [out]

    assert_same_bits_for_any_threads_and_rows(compute)


@DTYPES
def test_norm_of_a_sum_has_the_same_bits_for_any_threads_and_rows(dtype: torch.dtype) -> None:
    x, delta, weight = random(MANY, WIDTH), random(MANY, WIDTH, dtype=dtype), random(WIDTH)

    def compute(rows: slice) -> list[np.ndarray]:
        residual, out = x[rows].copy(), delta[rows].copy()
        layer_kernels.add_rms_norm_in_parts(
            parts_of(len(out)), residual, delta[rows].copy(), weight, EPS, out
        )
        return [residual, out]

    assert_same_bits_for_any_threads_and_rows(compute)


@DTYPES
def test_silu_has_the_same_bits_for_any_threads_and_rows(dtype: torch.dtype) -> None:
    gate_up = random(MANY, 2 * WIDTH, dtype=dtype)

    def compute(rows: slice) -> list[np.ndarray]:
        given = gate_up[rows].copy()
        out = np.zeros((len(given), WIDTH), given.dtype)
        layer_kernels.silu_mul_in_parts(parts_of(len(given)), given, out)
        return [out]

    assert_same_bits_for_any_threads_and_rows(compute)


@DTYPES
@pytest.mark.parametrize("norm", [0, DIM], ids=["plain", "normed"])
def test_rotation_has_the_same_bits_for_any_threads_and_rows(norm: int, dtype: torch.dtype) -> None:
    """Keys and values go to places in the pool that are in another order."""
    qkv, cos, sin = random(MANY, QKV, dtype=dtype), random(MANY, DIM // 2), random(MANY + 1, DIM // 2)[1:]
    q_norm, k_norm = random(norm), random(norm + 1)[1:]
    places = np.random.default_rng(0).permutation(MANY)

    def compute(rows: slice) -> list[np.ndarray]:
        given = qkv[rows].copy()
        pool = np.zeros((2 * MANY, KV_HEADS, DIM), given.dtype)
        query = np.zeros((len(given), HEADS, DIM), given.dtype)
        positions = np.arange(MANY)[rows].copy()
        layer_kernels.rotate_and_store_in_parts(
            *(parts_of(len(given)), given, positions, places[rows].copy(), cos, sin),
            *(q_norm, k_norm.copy(), EPS, pool, 0, MANY, query),
        )
        return [query, pool[places[rows]], pool[MANY + places[rows]]]

    assert_same_bits_for_any_threads_and_rows(compute)


@pytest.mark.parametrize(("inputs", "panels"), [(512, 1), (64, 9), (1536, 5)])
def test_product_has_the_same_bits_for_any_threads_and_rows(inputs: int, panels: int) -> None:
    x, weight = random(MANY, inputs), random(panels, inputs, gemm_small_m.PANEL)

    def compute(rows: slice) -> list[np.ndarray]:
        given = x[rows].copy()
        out = np.zeros((len(given), panels * gemm_small_m.PANEL), np.float32)
        gemm_small_m.multiply_by_all(given, weight.ctypes.data, 512, out)
        return [out]

    assert_same_bits_for_any_threads_and_rows(compute)
