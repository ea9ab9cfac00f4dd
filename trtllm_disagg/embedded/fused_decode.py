"""Decode steps of a plain model by decode_step.py: its weights and buffers, and the threads that help."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence as Seq

import numpy as np
import torch

from trtllm_disagg.embedded import decode_step
from trtllm_disagg.embedded.attention import KvPool, StepLayout
from trtllm_disagg.embedded.decode_step import ARRIVED, ARRIVED_BEFORE, ROWS, STOP, Buffers, Weights
from trtllm_disagg.embedded.linear import PackedLinear
from trtllm_disagg.embedded.panel_product import PANEL
from trtllm_disagg.embedded.panels import MOST_ROWS, Panels
from trtllm_disagg.embedded.plain_model import PlainModel
from trtllm_disagg.embedded.views import as_array


class FusedDecode:
    """One step at a time, called by one thread. `close` ends the helpers."""

    def __init__(self, model: PlainModel, pool: KvPool, num_threads: int) -> None:
        self._model = model  # owns the memory that the weights' addresses point to
        self._size = pool.tokens_per_block
        self._threads = num_threads
        self._weights = _weights(model)
        self._buffers = _buffers(model, pool, num_threads)
        self._logits = torch.from_numpy(self._buffers.logits)[:, : model.head.out_features]
        self._bells = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(1, num_threads)]
        self._helpers = [
            threading.Thread(target=self._help, args=(rank,), name="decode-helper", daemon=True)
            for rank in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    @staticmethod
    def serves(model: PlainModel) -> bool:
        """Whole panels everywhere, and the kernel knows every weight."""
        return (
            model.head.panels is not None
            and all(
                linear.panels is not None and linear.out_features % PANEL == 0
                for layer in model.layers
                for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
            )
            and all(layer.down.in_features % PANEL == 0 for layer in model.layers)
        )

    def __call__(self, tokens: Seq[int], layout: StepLayout) -> torch.Tensor:
        """Logits (sampling rows, vocabulary) float32, valid until the next step. Every row decodes, MOST_ROWS at most.

        A request that goes on after a pause has rows that do not sample: its own tokens once more.
        """
        buffers, rows = self._buffers, len(tokens)
        assert layout.decode is not None
        tables = layout.decode.tables
        buffers.tokens[:rows] = tokens
        buffers.positions[:rows] = layout.position_array
        buffers.slots[:rows] = layout.slot_array
        buffers.tables[:rows, : tables.shape[1]] = tables
        buffers.control[ROWS] = rows
        buffers.control[ARRIVED_BEFORE] = buffers.control[ARRIVED]
        self._ring()
        decode_step.decode(0, self._threads, self._weights, buffers, self._size)
        return self._logits[:rows] if len(layout.last) == rows else self._logits[layout.last]

    def close(self) -> None:
        self._buffers.control[STOP] = 1
        self._ring()
        for helper in self._helpers:
            helper.join(timeout=5)
        for bell in self._bells:
            os.close(bell)
        self._bells = []

    def _ring(self) -> None:
        for bell in self._bells:
            os.eventfd_write(bell, 1)

    def _help(self, rank: int) -> None:
        bell = self._bells[rank - 1]
        decode_step.serve(rank, self._threads, self._weights, self._buffers, self._size, bell)


def _weights(model: PlainModel) -> Weights:
    layers = model.layers
    linears = [[layer.qkv, layer.output, layer.gate_up, layer.down, model.head] for layer in layers]
    following = [layer.input_norm for layer in layers[1:]] + [model.final_norm]
    biases = [np.stack([_bias(row[kind]) for row in linears]) for kind in range(4)]
    return Weights(
        embedding=as_array(model.embedding),
        panels=np.array([[_panels(linear).address for linear in row] for row in linears], np.int64),
        blocks=np.array([[_panels(linear).block for linear in row] for row in linears], np.int64),
        qkv_bias=biases[0],
        output_bias=biases[1],
        gate_up_bias=biases[2],
        down_bias=biases[3],
        head_bias=_bias(model.head),
        first_norm=layers[0].input_norm,
        post_norm=np.stack([layer.post_norm for layer in layers]),
        next_norm=np.stack(following),
        q_norm=np.stack([layer.q_norm for layer in layers]),
        k_norm=np.stack([layer.k_norm for layer in layers]),
        eps=model.eps,
        cos=model.cos,
        sin=model.sin,
        scale=np.array([layer.scale for layer in layers], np.float32),
        window=np.array([layer.window or 0 for layer in layers], np.int64),
    )


def _buffers(model: PlainModel, pool: KvPool, num_threads: int) -> Buffers:
    num_layers, _, num_blocks, size, kv_heads, dim = pool.kv.shape
    layer = model.layers[0]
    hidden, inner = layer.output.out_features, layer.down.in_features
    longest = len(model.cos)

    def floats(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def stored(*shape: int) -> np.ndarray:
        return as_array(torch.zeros(shape, dtype=pool.kv.dtype))

    def numbers(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int64)

    attended = stored(MOST_ROWS, model.num_heads, dim)
    return Buffers(
        control=numbers(8),
        tokens=numbers(MOST_ROWS),
        positions=numbers(MOST_ROWS),
        slots=numbers(MOST_ROWS),
        tables=numbers(MOST_ROWS, -(-longest // size)),
        residual=floats(MOST_ROWS, hidden),
        hidden=stored(MOST_ROWS, hidden),
        qkv=floats(MOST_ROWS, layer.qkv.out_features),
        query=stored(MOST_ROWS, model.num_heads, dim),
        attended=attended,
        attended_flat=attended.reshape(MOST_ROWS, -1),
        delta=floats(MOST_ROWS, hidden),
        gate_up=floats(MOST_ROWS, 2 * inner),
        activated=stored(MOST_ROWS, inner),
        logits=floats(MOST_ROWS, -(-model.head.out_features // PANEL) * PANEL),
        scores=floats(num_threads, model.num_heads, longest),
        pool=as_array(pool.kv).reshape(num_layers, 2, num_blocks * size, kv_heads, dim),
        like=stored(1),
    )


def _panels(linear: PackedLinear) -> Panels:
    assert linear.panels is not None
    return linear.panels


def _bias(linear: PackedLinear) -> np.ndarray:
    if linear.bias_values is None:
        return np.empty(0, np.float32)
    return linear.bias_values.float().numpy()
