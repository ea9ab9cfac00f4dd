"""The operations between a transformer layer's matrix products, each as one compiled call (numba, CPU).

Kernels compute each row by itself, in an order that depends only on its length, so a token's bits do not depend on the
batch. The compiler may reorder nothing (llvm_ir.py has the sums), so they do not depend on the caller. Numbers are
stored as float32, or as bfloat16 in uint16 (numba lacks bfloat16); arithmetic is float32. Code is compiled on first use
and kept in files (compiled.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compiled
from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import exp, fma, sum_of_squares
from trtllm_disagg.engines.embedded.cpu_kernels.parallel import in_parts

#: Rows that a thread computes before it takes others.
ROWS_OF_A_PART = 32
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as the kernels read it: bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: np.ndarray = tensor.numpy()
    return array


def load(value: Any) -> Any:
    """A stored number as float32."""


def pack(value: Any, like: Any) -> Any:
    """A float32 as a number of `like`'s type, rounded to nearest even."""


@overload(load, inline="always")
def _load_overload(value: Any) -> Any:
    if value == types.uint16:

        def widen(value: Any) -> Any:
            return np.uint32(np.uint32(value) << 16).view(np.float32)

        return widen

    def same(value: Any) -> Any:
        return value

    return same


@overload(pack, inline="always")
def _pack_overload(value: Any, like: Any) -> Any:
    if like == types.uint16:

        def round_to_nearest_even(value: Any, like: Any) -> Any:
            bits = np.float32(value).view(np.uint32)
            return np.uint16(np.uint32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

        return round_to_nearest_even

    def same(value: Any, like: Any) -> Any:
        return value

    return same


@compiled(inner=True)
def rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """out (rows, n) = x / rms(x) * weight; x and weight float32."""
    rows, n = x.shape
    for r in range(rows):
        scale = _ONE / np.sqrt(sum_of_squares(x[r]) / np.float32(n) + eps)
        for i in range(n):
            out[r, i] = pack(x[r, i] * scale * weight[i], out[r, i])


@compiled(inner=True)
def add_rms_norm(x: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """x (rows, n) float32 += delta; out = x / rms(x) * weight."""
    rows, n = x.shape
    for r in range(rows):
        for i in range(n):
            x[r, i] += load(delta[r, i])
        scale = _ONE / np.sqrt(sum_of_squares(x[r]) / np.float32(n) + eps)
        for i in range(n):
            out[r, i] = pack(x[r, i] * scale * weight[i], out[r, i])


@compiled(inner=True)
def silu_mul(gate_up: Any, out: Any, first: Any, last: Any) -> None:
    """out (rows, n) = silu(gate) * up, for gate_up (rows, 2 n), in the columns `first` to `last`."""
    n = out.shape[1]
    for r in range(out.shape[0]):
        # Slices from zero on: an index that might be negative costs more than the arithmetic.
        gates, ups = gate_up[r, first:last], gate_up[r, n + first : n + last]
        target = out[r, first:last]
        for i in range(target.shape[0]):
            gate = load(gates[i])
            # Below -88 the exponential would overflow, and silu is zero.
            silu = gate / (_ONE + exp(min(-gate, np.float32(88.0))))
            target[i] = pack(silu * load(ups[i]), target[i])


@compiled(inner=True)
def embed(tokens: Any, embedding: Any, out: Any) -> None:
    """out (rows, n) float32 = the rows of embedding (vocabulary, n)."""
    for r in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[r, i] = load(embedding[tokens[r], i])


@compiled(inner=True)
def add_bias_and_round(x: Any, bias: Any, first: Any, last: Any, like: Any) -> None:
    """x (rows, columns) float32 += bias, which may be empty, then to the precision of `like`, in some columns."""
    for r in range(x.shape[0]):
        numbers = x[r, first:last]
        if bias.shape[0] > 0:
            some = bias[first:last]
            for i in range(numbers.shape[0]):
                numbers[i] = load(pack(numbers[i] + some[i], like))
        else:
            for i in range(numbers.shape[0]):
                numbers[i] = load(pack(numbers[i], like))


@compiled()
def weighted_sum(x: Any, places: Any, weights: Any, out: Any) -> None:
    """out[r] = sum over j of weights[r, j] * x[places[r, j]], in the order of j; weights float32."""
    rows, count = places.shape
    n = out.shape[1]
    total = np.empty(n, np.float32)
    for r in range(rows):
        target = out[r]
        total[:] = _ZERO
        for j in range(count):
            row, weight = x[places[r, j]], weights[r, j]
            for i in range(n):
                total[i] = fma(weight, load(row[i]), total[i])
        for i in range(n):
            target[i] = pack(total[i], target[i])


@compiled(inner=True)
def rotate_group(
    qkv: Any,
    kv: Any,
    c: Any,
    s: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    key: Any,
    value: Any,
    q: Any,
    buffer: Any,
) -> None:
    """One row, one KV head and its query heads: qkv is the row, key and value (H, D) where its K and V go, q (Hq, D)
    its own.
    """
    num_heads, dim = q.shape
    kv_heads = key.shape[0]
    group = num_heads // kv_heads
    for g in range(group):
        head = kv * group + g
        _rotate(qkv[head * dim : (head + 1) * dim], c, s, q_norm, eps, q[head], buffer)
    head = num_heads + kv
    _rotate(qkv[head * dim : (head + 1) * dim], c, s, k_norm, eps, key[kv], buffer)
    base = (num_heads + kv_heads + kv) * dim
    for d in range(dim):
        value[kv, d] = pack(load(qkv[base + d]), value[kv, d])


@compiled(inner=True)
def _rotate(x: Any, c: Any, s: Any, norm: Any, eps: Any, out: Any, buffer: Any) -> None:
    dim = x.shape[0]
    half = dim // 2
    for d in range(dim):
        buffer[d] = load(x[d])
    if norm.shape[0] > 0:
        scale = _ONE / np.sqrt(sum_of_squares(buffer) / np.float32(dim) + eps)
        for d in range(dim):
            buffer[d] = buffer[d] * scale * norm[d]
    for d in range(half):
        a, b = buffer[d], buffer[half + d]
        out[d] = pack(fma(a, c[d], -(b * s[d])), out[d])
        out[half + d] = pack(fma(b, c[d], a * s[d]), out[d])


# -- the same on several threads: part 0 are the first rows, and so on


@compiled(inline="always")
def _rows_of(part: Any, rows: Any) -> Any:
    first = part * ROWS_OF_A_PART
    return first, min(first + ROWS_OF_A_PART, rows)


@compiled(inner=True)
def rms_norm_part(part: Any, x: Any, weight: Any, eps: Any, out: Any) -> None:
    first, last = _rows_of(part, x.shape[0])
    rms_norm(x[first:last], weight, eps, out[first:last])


@compiled(inner=True)
def add_rms_norm_part(part: Any, x: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    first, last = _rows_of(part, x.shape[0])
    add_rms_norm(x[first:last], delta[first:last], weight, eps, out[first:last])


@compiled(inner=True)
def silu_mul_part(part: Any, gate_up: Any, out: Any) -> None:
    first, last = _rows_of(part, out.shape[0])
    silu_mul(gate_up[first:last], out[first:last], 0, out.shape[1])


@compiled(inner=True)
def rotate_and_store_part(
    part: Any,
    qkv: Any,
    positions: Any,
    places: Any,
    cos: Any,
    sin: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    pool: Any,
    key_row: Any,
    value_row: Any,
    q: Any,
) -> None:
    """Split qkv (rows, (Hq + 2 H) * D); normalise (when q_norm is not empty) and rotate q and k; k and v go into
    pool (rows of the pool, H, D), so far behind places[r], and q into q (rows, Hq, D). cos and sin are
    (positions, D / 2), float32.
    """
    buffer = np.empty(q.shape[2], np.float32)
    first, last = _rows_of(part, q.shape[0])
    for r in range(first, last):
        c, s, place = cos[positions[r]], sin[positions[r]], places[r]
        key, value = pool[place + key_row], pool[place + value_row]
        for kv in range(pool.shape[1]):
            rotate_group(qkv[r], kv, c, s, q_norm, k_norm, eps, key, value, q[r], buffer)


rms_norm_in_parts, add_rms_norm_in_parts, silu_mul_in_parts, rotate_and_store_in_parts = (
    in_parts(kernel) for kernel in (rms_norm_part, add_rms_norm_part, silu_mul_part, rotate_and_store_part)
)


def parts_of(rows: int) -> int:
    return -(-rows // ROWS_OF_A_PART)
