"""What lies between the matrix products of a transformer layer, each as one compiled call (numba, CPU).

Every row is computed by itself, in an order that depends on nothing but its own length, so the bits of a token do
not change with who else is in the batch. Storage is float32, or bfloat16 as uint16 (numba has no such type); all
arithmetic is float32. Compiled on first use and cached beside this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

_OPTIONS: dict[str, Any] = {"fastmath": True, "boundscheck": False, "nogil": True, "error_model": "numpy"}
_KERNEL: dict[str, Any] = _OPTIONS | {"cache": True}

_LOG2_E = np.float32(1.4426950408889634)
#: 2**r on [0, 1), highest power first; relative error below 3e-7.
_P6, _P5, _P4, _P3, _P2, _P1 = (
    np.float32(c)
    for c in (
        1.5403530393381609e-4,
        1.3333558146428443e-3,
        9.618129107628477e-3,
        5.550410866482158e-2,
        2.402265069591007e-1,
        6.931471805599453e-1,
    )
)
_ONE, _ZERO, _LOWEST = np.float32(1.0), np.float32(0.0), np.float32(-3.0e38)
#: Beyond it tanh is one, in float32.
_TWO, _FLAT = np.float32(2.0), np.float32(10.0)


def _load(value: Any) -> Any:
    """A stored number as float32."""


def _pack(value: Any, like: Any) -> Any:
    """A float32 as a number of `like`'s kind, rounded to nearest even."""


@overload(_load, inline="always")
def _load_overload(value: Any) -> Any:
    if value == types.uint16:

        def widen(value: Any) -> Any:
            return np.uint32(np.uint32(value) << 16).view(np.float32)

        return widen

    def same(value: Any) -> Any:
        return value

    return same


@overload(_pack, inline="always")
def _pack_overload(value: Any, like: Any) -> Any:
    if like == types.uint16:

        def round_to_nearest_even(value: Any, like: Any) -> Any:
            bits = np.float32(value).view(np.uint32)
            return np.uint16(np.uint32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

        return round_to_nearest_even

    def same(value: Any, like: Any) -> Any:
        return value

    return same


@njit(inline="always", **_OPTIONS)
def _exp(x: Any) -> Any:
    """exp by 2**k * 2**r: it vectorises, which the C library's does not. Arguments up to 88."""
    z = max(x * _LOG2_E, np.float32(-126.0))
    k = np.floor(z)
    r = z - k
    p = (((((_P6 * r + _P5) * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _ONE
    # numba widens integer sums to 64 bits.
    return p * np.int32((np.int32(k) + 127) << 23).view(np.float32)


@njit(inline="always", **_OPTIONS)
def _tanh(x: Any) -> Any:
    e = _exp(_TWO * min(max(x, -_FLAT), _FLAT))
    return (e - _ONE) / (e + _ONE)


@njit(**_KERNEL)
def rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """out (rows, n) = x / rms(x) * weight; x and weight float32."""
    rows, n = x.shape
    for r in range(rows):
        total = _ZERO
        for i in range(n):
            total += x[r, i] * x[r, i]
        scale = _ONE / np.sqrt(total / np.float32(n) + eps)
        for i in range(n):
            out[r, i] = _pack(x[r, i] * scale * weight[i], out[r, i])


@njit(**_KERNEL)
def add_rms_norm(x: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """x (rows, n) float32 += delta; out = x / rms(x) * weight."""
    rows, n = x.shape
    for r in range(rows):
        total = _ZERO
        for i in range(n):
            v = x[r, i] + _load(delta[r, i])
            x[r, i] = v
            total += v * v
        scale = _ONE / np.sqrt(total / np.float32(n) + eps)
        for i in range(n):
            out[r, i] = _pack(x[r, i] * scale * weight[i], out[r, i])


@njit(**_KERNEL)
def silu_mul(gate_up: Any, out: Any) -> None:
    """out (rows, n) = silu(gate) * up, for gate_up (rows, 2 n)."""
    rows, width = gate_up.shape
    n = width // 2
    for r in range(rows):
        for i in range(n):
            gate = _load(gate_up[r, i])
            up = _load(gate_up[r, n + i])
            # Below -88 the exponential would overflow, and silu is zero.
            out[r, i] = _pack(gate / (_ONE + _exp(min(-gate, np.float32(88.0)))) * up, out[r, i])


@njit(**_KERNEL)
def weighted_sum(x: Any, places: Any, weights: Any, out: Any) -> None:
    """out[r] = sum over j of weights[r, j] * x[places[r, j]], in the order of j; weights float32."""
    rows, count = places.shape
    n = out.shape[1]
    total = np.empty(n, np.float32)
    for r in range(rows):
        total[:] = _ZERO
        for j in range(count):
            place, weight = places[r, j], weights[r, j]
            for i in range(n):
                total[i] += weight * _load(x[place, i])
        for i in range(n):
            out[r, i] = _pack(total[i], out[r, i])


@njit(**_KERNEL)
def rotate_and_store(
    qkv: Any,
    positions: Any,
    slots: Any,
    cos: Any,
    sin: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    keys: Any,
    values: Any,
    q: Any,
) -> None:
    """Split qkv (rows, (Hq + 2 H) * D); normalise (when q_norm is not empty) and rotate q and k; k and v go into
    keys and values (slots, H, D), q into q (rows, Hq, D). cos and sin are (positions, D / 2), float32.
    """
    rows = qkv.shape[0]
    num_heads, dim = q.shape[1], q.shape[2]
    kv_heads = keys.shape[1]
    half = dim // 2
    head_buffer = np.empty(dim, np.float32)
    for r in range(rows):
        c, s, slot = cos[positions[r]], sin[positions[r]], slots[r]
        for head in range(num_heads + kv_heads):
            base = head * dim
            for d in range(dim):
                head_buffer[d] = _load(qkv[r, base + d])
            norm = q_norm if head < num_heads else k_norm
            if norm.shape[0] > 0:
                total = _ZERO
                for d in range(dim):
                    total += head_buffer[d] * head_buffer[d]
                scale = _ONE / np.sqrt(total / np.float32(dim) + eps)
                for d in range(dim):
                    head_buffer[d] = head_buffer[d] * scale * norm[d]
            out = q[r, head] if head < num_heads else keys[slot, head - num_heads]
            for d in range(half):
                a, b = head_buffer[d], head_buffer[half + d]
                out[d] = _pack(a * c[d] - b * s[d], out[d])
                out[half + d] = _pack(b * c[d] + a * s[d], out[d])
        base = (num_heads + kv_heads) * dim
        for head in range(kv_heads):
            for d in range(dim):
                values[slot, head, d] = qkv[r, base + head * dim + d]


@njit(**_KERNEL)
def attend_rows(
    q: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    starts: Any,
    block: Any,
    scale: Any,
    softcap: Any,
    scores: Any,
    out: Any,
) -> None:
    """One query a row: q and out (rows, Hq, D), keys and values (slots, H, D), tables (rows, blocks) of block ids.

    Row r sees positions starts[r] to contexts[r]. A softcap above zero bounds the scores. `scores` is scratch
    (Hq / H, longest context), float32.
    """
    rows, num_heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = num_heads // kv_heads
    query = np.empty((group, dim), np.float32)
    total_out = np.empty((group, dim), np.float32)
    for r in range(rows):
        start, context = starts[r], contexts[r]
        for kv in range(kv_heads):
            for g in range(group):
                for d in range(dim):
                    query[g, d] = _load(q[r, kv * group + g, d]) * scale
                    total_out[g, d] = _ZERO
            i, position = 0, start
            while position < context:
                inside = position % block
                first = tables[r, position // block] * block + inside
                count = min(block - inside, context - position)
                for t in range(count):
                    for g in range(group):
                        score = _ZERO
                        for d in range(dim):
                            score += query[g, d] * _load(keys[first + t, kv, d])
                        scores[g, i] = score
                    i += 1
                position += count
            n = i
            for g in range(group):
                top, weight = _LOWEST, _ZERO
                if softcap > _ZERO:
                    for i in range(n):
                        scores[g, i] = softcap * _tanh(scores[g, i] / softcap)
                for i in range(n):
                    top = max(top, scores[g, i])
                for i in range(n):
                    e = _exp(scores[g, i] - top)
                    scores[g, i] = e
                    weight += e
                for d in range(dim):
                    query[g, d] = _ONE / weight
            i, position = 0, start
            while position < context:
                inside = position % block
                first = tables[r, position // block] * block + inside
                count = min(block - inside, context - position)
                for t in range(count):
                    for g in range(group):
                        e = scores[g, i]
                        for d in range(dim):
                            total_out[g, d] += e * _load(values[first + t, kv, d])
                    i += 1
                position += count
            for g in range(group):
                for d in range(dim):
                    out[r, kv * group + g, d] = _pack(
                        total_out[g, d] * query[g, d], out[r, kv * group + g, d]
                    )
