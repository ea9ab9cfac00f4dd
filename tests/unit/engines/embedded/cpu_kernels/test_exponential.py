"""The exponential of the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compiled
from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import exp, exponentials


@compiled()
def exp_of_each(x: Any) -> None:
    for i in range(x.shape[0]):
        x[i] = exp(x[i])


@compiled()
def exponentials_of_all(x: Any) -> Any:
    return exponentials(x, x.shape[0])


def test_relative_error_is_below_2e_7_wherever_the_result_is_a_normal_number() -> None:
    x = np.linspace(-87, 88, 1_000_001, dtype=np.float32)
    wanted = np.exp(x.astype(np.float64))
    exp_of_each(x)
    assert np.abs(x / wanted - 1).max() < 2e-7


def test_exponentials_of_a_run_are_those_of_its_numbers() -> None:
    x = np.linspace(-70, 0, 1003, dtype=np.float32)
    each = x.copy()
    exp_of_each(each)
    total = exponentials_of_all(x)
    assert np.array_equal(x, each)
    assert abs(total / each.astype(np.float64).sum() - 1) < 1e-6


def test_zero_gives_one_and_no_number_gives_none() -> None:
    x = np.array([0.0, np.nan, -1e30], np.float32)
    exp_of_each(x)
    assert x[0] == 1
    assert np.isnan(x[1])
    assert 0 <= x[2] < 1.3e-38
