"""A decode step from embedding to logits as one compiled call, on one or several threads.

It runs forward.py's kernels in the same order, so it has the same bits, and saves about fifty calls per step and fifty
wake-ups of threads. Between stages, threads wait for each other at a barrier. Between steps they sleep without the
interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from trtllm_disagg.engines.embedded.cpu_kernels import decode_attention
from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compile_unless_locked, compiled
from trtllm_disagg.engines.embedded.cpu_kernels.decode_attention import attend_heads
from trtllm_disagg.engines.embedded.cpu_kernels.gemm_small_m import PANEL, multiply
from trtllm_disagg.engines.embedded.cpu_kernels.layer_kernels import (
    add_bias_and_round,
    add_rms_norm,
    embed,
    rms_norm,
    rotate_group,
    silu_mul,
)
from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import I64, borrowed, emitted, pointer

#: Columns of `Weights.panels` and `Weights.blocks`.
QKV, OUTPUT, GATE_UP, DOWN, HEAD = range(5)
#: Places in `Buffers.control`.
ROWS, BARRIER, STOP = range(3)

_NO_CAP = np.float32(0.0)
#: Loads before the processor is offered to others: a few microseconds.
_SPINS = 4000


class Weights(NamedTuple):
    """What stays. T is what is computed in and S what is stored: float32, or bfloat16 as uint16; L layers, n hidden,
    D of a head.
    """

    #: (vocabulary, n) S
    embedding: np.ndarray
    #: (L, 5) addresses of packed weights; the head's is in every row
    panels: np.ndarray
    #: (L, 5) inputs that are summed at a time
    blocks: np.ndarray
    #: (L, outputs) float32 each, or (L, 0) for none
    qkv_bias: np.ndarray
    output_bias: np.ndarray
    gate_up_bias: np.ndarray
    down_bias: np.ndarray
    head_bias: np.ndarray
    #: (n,), (L, n), (L, n) float32; next_norm is the following layer's first, at last the final one
    first_norm: np.ndarray
    post_norm: np.ndarray
    next_norm: np.ndarray
    #: (L, D) float32, or (L, 0)
    q_norm: np.ndarray
    k_norm: np.ndarray
    eps: np.float32
    #: (positions, D / 2) float32
    cos: np.ndarray
    sin: np.ndarray
    #: (L,) float32; (L,) int64, 0 for no window
    scale: np.ndarray
    window: np.ndarray


class Buffers(NamedTuple):
    """What a step works on, with room for R rows; made once. Products are float32 numbers that T can hold."""

    control: np.ndarray
    #: (R,) int64 each
    tokens: np.ndarray
    positions: np.ndarray
    #: of the tokens in the pool (kv_cache/pool.py)
    places: np.ndarray
    #: (R, blocks) int64: where each block begins in the pool
    tables: np.ndarray
    #: (R, n) float32
    residual: np.ndarray
    #: (R, n) T
    hidden: np.ndarray
    #: (R, (Hq + 2 H) * D) float32
    qkv: np.ndarray
    #: (R, Hq, D) T
    query: np.ndarray
    #: (R, Hq, D) T, and the same memory as (R, Hq * D)
    attended: np.ndarray
    attended_flat: np.ndarray
    #: (R, n) float32
    delta: np.ndarray
    #: (R, 2 * intermediate) float32, (R, intermediate) T
    gate_up: np.ndarray
    activated: np.ndarray
    #: (R, vocabulary rounded up to panels) float32
    logits: np.ndarray
    #: (threads, Hq, longest context) float32
    scores: np.ndarray
    #: (rows of the pool, H, D) S
    pool: np.ndarray
    #: (1,) T: says what T is
    like: np.ndarray


_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_read = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp))


@emitted(types.int64, types.intp, types.int64)
def _atomic_add(builder: Any, address: Any, amount: Any) -> Any:
    """To the int64 at `address`; the value before."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), amount, "seq_cst")


@emitted(types.int64, types.intp)
def _atomic_load(builder: Any, address: Any) -> Any:
    return builder.load_atomic(pointer(builder, address, I64), "seq_cst", 8)


@compiled(inner=True)
def barrier_wait(counter: Any, num_threads: Any) -> None:
    """Return when each of the threads has called it as often as this one. `counter` is the address of an int64 that
    counts the calls of all, from zero on.
    """
    called = _atomic_add(counter, 1)
    target = called - called % num_threads + num_threads
    spins = 0
    while _atomic_load(counter) < target:
        spins += 1
        if spins >= _SPINS:
            spins = 0
            _sched_yield()


@compiled(inner=True)
def wait_for_event(event_fd: Any, scratch: Any) -> Any:
    """Block in the kernel until this eventfd is written to. False when something else ended the wait, a signal say.
    `scratch` is an int64 array of one.
    """
    return _read(event_fd, scratch.ctypes.data, 8) == 8


@compiled(inner=True)
def share_of(count: Any, rank: Any, num_threads: Any) -> Any:
    """(first, last) of this thread's part of `count` items."""
    return count * rank // num_threads, count * (rank + 1) // num_threads


@compiled(inner=True)
def _project(x: Any, address: Any, block: Any, bias: Any, out: Any, first: Any, last: Any, like: Any) -> None:
    """Panels `first` to `last` of x times a weight."""
    multiply(x, address, block, out, first, last)
    if bias.shape[0] > 0 or like.itemsize < 4:
        # A head's last panel may be wider than its vocabulary.
        end = min(last * PANEL, bias.shape[0]) if bias.shape[0] > 0 else last * PANEL
        add_bias_and_round(out, bias, first * PANEL, end, like[0])


@compiled(inner=True)
def _attend(w: Any, b: Any, layer: Any, rank: Any, num_threads: Any, tokens_per_block: Any) -> None:
    """Rotate, store and attend. With enough rows each rank takes rows, else heads of every row."""
    rows, kv_heads = b.control[ROWS], b.pool.shape[1]
    num_heads, dim = b.query.shape[1], b.query.shape[2]
    buffer = np.empty(dim, np.float32)
    query = np.empty((num_heads, dim), np.float32)
    summed = np.empty((num_heads, dim), np.float32)
    key_row = 2 * layer * tokens_per_block
    first, last, low, high = 0, rows, 0, kv_heads
    if rows >= 2 * num_threads:
        first, last = share_of(rows, rank, num_threads)
    else:
        low, high = share_of(kv_heads, rank, num_threads)
    for r in range(first, last):
        position, at = b.positions[r], b.places[r] + key_row
        key, value = b.pool[at], b.pool[at + tokens_per_block]
        for kv in range(low, high):
            rotate_group(
                b.qkv[r],
                kv,
                w.cos[position],
                w.sin[position],
                w.q_norm[layer],
                w.k_norm[layer],
                w.eps,
                key,
                value,
                b.query[r],
                buffer,
            )
        window = w.window[layer]
        start = max(0, position + 1 - window) if window > 0 else 0
        attend_heads(
            b.query[r],
            low,
            high,
            b.pool,
            key_row,
            tokens_per_block,
            b.tables[r],
            start,
            position + 1,
            w.scale[layer],
            _NO_CAP,
            b.scores[rank],
            query,
            summed,
            b.attended[r],
        )


def compile_ahead(num_threads: int, w: Weights, b: Buffers, tokens_per_block: int) -> None:
    """Compile attention, then its callers. Another engine that starts meanwhile compiles other kernels."""
    if decode_attention.compile_heads_ahead(b.query, b.pool):
        compile_unless_locked(_attend, w, b, 0, 0, num_threads, tokens_per_block)
        decode_attention.compile_rows_ahead(b.query, b.pool)


@compiled()
def decode(rank: Any, num_threads: Any, w: Any, b: Any, tokens_per_block: Any) -> None:
    """One token of each row through the model, by all threads together; each calls it with its rank. Logits are in
    b.logits then.
    """
    w, b = borrowed(w), borrowed(b)
    rows = b.control[ROWS]
    barrier = b.control.ctypes.data + 8 * BARRIER
    residual, hidden, delta = b.residual[:rows], b.hidden[:rows], b.delta[:rows]
    first, last = share_of(rows, rank, num_threads)
    num_layers = w.panels.shape[0]
    qkv_panels, hidden_panels = b.qkv.shape[1] // PANEL, b.hidden.shape[1] // PANEL
    inner_panels = b.activated.shape[1] // PANEL
    embed(b.tokens[first:last], w.embedding, residual[first:last])
    rms_norm(residual[first:last], w.first_norm, w.eps, hidden[first:last])
    for layer in range(num_layers):
        at, blocks = w.panels[layer], w.blocks[layer]
        barrier_wait(barrier, num_threads)
        p, q = share_of(qkv_panels, rank, num_threads)
        _project(hidden, at[QKV], blocks[QKV], w.qkv_bias[layer], b.qkv[:rows], p, q, b.like)
        barrier_wait(barrier, num_threads)
        _attend(w, b, layer, rank, num_threads, tokens_per_block)
        barrier_wait(barrier, num_threads)
        p, q = share_of(hidden_panels, rank, num_threads)
        x = b.attended_flat[:rows]
        _project(x, at[OUTPUT], blocks[OUTPUT], w.output_bias[layer], delta, p, q, b.like)
        barrier_wait(barrier, num_threads)
        add_rms_norm(residual[first:last], delta[first:last], w.post_norm[layer], w.eps, hidden[first:last])
        barrier_wait(barrier, num_threads)
        p, q = share_of(inner_panels, rank, num_threads)
        gate_up, bias = b.gate_up[:rows], w.gate_up_bias[layer]
        _project(hidden, at[GATE_UP], blocks[GATE_UP], bias, gate_up, p, q, b.like)
        up, to = inner_panels + p, inner_panels + q
        _project(hidden, at[GATE_UP], blocks[GATE_UP], bias, gate_up, up, to, b.like)
        silu_mul(gate_up, b.activated[:rows], p * PANEL, q * PANEL)
        barrier_wait(barrier, num_threads)
        p, q = share_of(hidden_panels, rank, num_threads)
        x = b.activated[:rows]
        _project(x, at[DOWN], blocks[DOWN], w.down_bias[layer], delta, p, q, b.like)
        barrier_wait(barrier, num_threads)
        add_rms_norm(residual[first:last], delta[first:last], w.next_norm[layer], w.eps, hidden[first:last])
    barrier_wait(barrier, num_threads)
    p, q = share_of(b.logits.shape[1] // PANEL, rank, num_threads)
    _project(hidden, w.panels[0, HEAD], w.blocks[0, HEAD], w.head_bias, b.logits[:rows], p, q, b.like)
    barrier_wait(barrier, num_threads)


@compiled()
def serve(rank: Any, num_threads: Any, w: Any, b: Any, tokens_per_block: Any, event_fd: Any) -> None:
    """What the other threads do: a part of every step, asleep between them."""
    scratch = np.zeros(1, np.int64)
    while True:
        called = wait_for_event(event_fd, scratch)
        if b.control[STOP] != 0:
            return
        if called:
            decode(rank, num_threads, w, b, tokens_per_block)
